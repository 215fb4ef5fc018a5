"""A model process without a model: hands memory over and moves its counter as it is told on standard input.

python agent_model_process.py HANDOFF_PATH SESSION SEED
"""

import asyncio
import sys

from agent_kit import Model


def main() -> None:
    path, session, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    model = Model()
    model.fill(seed)
    asyncio.run(model.attach(path, session))
    print("attached", flush=True)
    for line in sys.stdin:
        model.counter.advance(int(line))


if __name__ == "__main__":
    main()
