"""Every bar of the transfer agent, one script after the other, and one table of them all.

python tests/bench/agent_bars.py [--quick]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
SCRIPTS = {
    "fabric.py": ["--rounds", "5", "--mib", "32"],
    "peers.py": ["--rounds", "5", "--mib", "32"],
    "layer_latency.py": ["--layers", "300"],
    "plan_time.py": ["--rounds", "10"],
    "in_flight.py": ["--samples", "200", "--rounds", "5"],
    "killed.py": ["--rounds", "5"],
    "soak.py": ["--transfers", "50000"],
}
VERDICTS = ("pass  ", "FAIL  ", "skip  ")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="less of everything: to see that it runs")
    quick: bool = parser.parse_args().quick
    table: list[str] = []
    missed: list[str] = []
    for script, fewer in SCRIPTS.items():
        print(f"== {script}", flush=True)
        command = [sys.executable, str(HERE / script), *(fewer if quick else [])]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                if line.startswith(VERDICTS) and line not in table:
                    table.append(line)
        if process.returncode != 0:
            missed.append(script)
    print("\n== all")
    print("".join(table), end="")
    print(f"missed: {', '.join(missed) or 'none'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
