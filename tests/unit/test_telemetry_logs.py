import io
import json
import logging

import pytest

from baton_telemetry import configure_logging


@pytest.fixture(autouse=True)
def restore():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def log(log_format, **extra):
    stream = io.StringIO()
    configure_logging("agent", log_format, stream=stream)
    logging.getLogger("baton_agent.x").debug("not shown")
    logging.getLogger("baton_agent.x").warning("slot %d", 7, extra=extra)
    try:
        raise ValueError("boom")
    except ValueError:
        logging.getLogger("baton_agent.x").exception("failed")
    return stream.getvalue()


def test_text():
    lines = log("text", transfer=5).splitlines()
    assert lines[0][12:] == " WARNING agent baton_agent.x: slot 7 transfer=5"
    assert lines[1].endswith("ERROR agent baton_agent.x: failed")
    assert lines[-1] == "ValueError: boom"


def test_json():
    first, second = map(json.loads, log("json", transfer=5).splitlines())
    assert first["time"] > 1e9
    assert {key: first[key] for key in first if key != "time"} == {
        "level": "WARNING",
        "service": "agent",
        "logger": "baton_agent.x",
        "message": "slot 7",
        "transfer": 5,
    }
    assert "ValueError: boom" in second["traceback"]
