"""The process that holds one rank's weights and KV cache: `python -m baton_engine.model_process --fd N --parent PID`.

It talks to its worker over the socket N, to its agent over the hand-off connection, to the other ranks of its engine
through their group (`--group M`), and to nobody else: no gRPC, no fabric, no INET socket (but NCCL's own on loopback,
if its engine has several GPUs). It leaves when the worker closes the socket, and is killed when the worker dies.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import re
import selectors
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from baton_engine.errors import EngineError, FrameInvalid
from baton_engine.framing import FrameDecoder, encode_frame
from baton_engine.lifeline import Orphaned, die_with_parent
from baton_engine.messages import (
    AgentLost,
    Attach,
    Attached,
    AttachRefused,
    EngineInfo,
    EngineSpec,
    FromModel,
    Inspect,
    Inspection,
    Load,
    LoadFailed,
    Loading,
    Ready,
    StepFailed,
    StepPlan,
    ToModel,
)

if TYPE_CHECKING:
    from baton_engine.executor import Executor
    from baton_engine.runner import LoadModel, ModelFacts, ModelRunner, Progress
    from baton_kv.layout import PageLayout
    from baton_memory import HandoffConnection
    from baton_model.parallel import RankGroup

logger = logging.getLogger(__name__)


class ModelProcess:
    """The loop: one message from the worker at a time, and an eye on the hand-off connection."""

    def __init__(self, worker: socket.socket, load_model: LoadModel, group_fd: int | None = None) -> None:
        """`group_fd`: from `group_memory.open_group`; None for an engine of one rank."""
        self._worker = worker
        self._group_fd = group_fd
        self._load_model = load_model
        self._frames = FrameDecoder()
        self._decoder = msgspec.msgpack.Decoder(ToModel)
        self._encoder = msgspec.msgpack.Encoder()
        self._selector = selectors.DefaultSelector()
        self._selector.register(worker, selectors.EVENT_READ)
        self._executor: Executor | None = None
        self._info: EngineInfo | None = None
        self._spec: EngineSpec | None = None
        self._agent: tuple[HandoffConnection, int] | None = None

    def run(self) -> None:
        """Serves until the worker closes its socket. Raises FrameInvalid or msgspec's error on garbage."""
        try:
            while True:
                for key, _ in self._selector.select():
                    if key.fileobj is not self._worker:
                        # Perhaps a former agent's end, found together with the message that replaced it.
                        if self._agent is not None and key.fileobj is self._agent[0]:
                            self._drop_agent()
                        continue
                    data = self._worker.recv(1 << 18)
                    if not data:
                        return self._frames.finish()
                    for frame in self._frames.feed(data):
                        self._answer(self._decoder.decode(frame))
        except (BrokenPipeError, ConnectionResetError):
            return None

    def _answer(self, message: ToModel) -> None:
        if isinstance(message, StepPlan):
            self._step(message)
        elif isinstance(message, Attach):
            self._attach(message)
        elif isinstance(message, Load):
            self._load(message.spec)
        else:
            assert isinstance(message, Inspect)
            self._inspect()

    def _send(self, message: FromModel) -> None:
        self._worker.sendall(encode_frame(self._encoder.encode(message)))

    def _load(self, spec: EngineSpec) -> None:
        try:
            if self._executor is not None:
                raise EngineError("the model is loaded already")
            self._executor, self._info = self._build(spec)
            self._spec = spec
        except Exception as error:
            _log_untyped(f"loading {spec.model_path} failed", error)
            self._send(LoadFailed(getattr(error, "status", "INTERNAL"), _reason(error), _text(error)))
        else:
            self._send(Ready(self._info))

    def _build(self, spec: EngineSpec) -> tuple[Executor, EngineInfo]:
        if spec.cpus:
            # Before torch starts any thread, so that all of them inherit it.
            os.sched_setaffinity(0, spec.cpus)
        self._send(Loading("import", 0.0))
        import torch

        from baton_engine.executor import Executor, cache_layout
        from baton_engine.groups import make_group
        from baton_engine.place import open_place

        torch.set_num_threads(spec.threads)
        torch.set_grad_enabled(False)
        self._send(Loading("weights", 0.3))
        group = make_group(spec, self._group_fd)
        runner = self._load_model(spec, lambda stage, fraction: self._send(Loading(stage, 0.3 + 0.5 * fraction)), group)
        layout = cache_layout(spec, runner.facts)
        self._send(Loading("cache", 0.8))
        executor = Executor(runner, layout, group, open_place(spec, layout))
        self._send(Loading("warm-up", 0.95))
        group.meet()
        executor.warm_up()
        chunk_tokens = None if spec.chunk_s is None else executor.measure_chunk(spec.chunk_s)
        # What is alive now stays so; the collector need not walk it again in the middle of a step.
        gc.collect()
        gc.freeze()
        return executor, describe(spec, runner.facts, layout, chunk_tokens)

    def _step(self, plan: StepPlan) -> None:
        started_ns = time.monotonic_ns()
        try:
            if self._executor is None:
                raise EngineError("no model is loaded")
            result = self._executor.run(plan, started_ns)
        except Exception as error:
            _log_untyped(f"step {plan.step} failed", error)
            self._send(StepFailed(plan.step, _reason(error), _text(error)))
        else:
            self._send(result)

    def _attach(self, message: Attach) -> None:
        from baton_engine.offering import offer_cache

        self._drop_agent()
        try:
            if self._executor is None or self._info is None or self._spec is None:
                raise EngineError("no model is loaded")
            connection = offer_cache(self._executor, self._info, self._spec, message.handoff_path, message.session)
        except Exception as error:
            self._send(AttachRefused(message.session, _reason(error), _text(error)))
            return
        self._agent = connection, message.session
        self._selector.register(connection, selectors.EVENT_READ)
        self._send(Attached(message.session))

    def _drop_agent(self) -> None:
        """Closes the hand-off connection, if there is one. The agent never writes to it: readable means ended."""
        if self._agent is None:
            return
        connection, session = self._agent
        self._agent = None
        self._selector.unregister(connection)
        connection.close()
        self._send(AgentLost(session))

    def _inspect(self) -> None:
        packages = sorted({name.partition(".")[0] for name in sys.modules})
        executor = self._executor
        self._send(
            Inspection(
                tuple(packages),
                executor.sequences if executor else (),
                executor.counter.value() if executor else 0,
            )
        )


def _load_checkpoint(spec: EngineSpec, progress: Progress, group: RankGroup) -> ModelRunner:
    from baton_engine.baton_runner import load_model

    return load_model(spec, progress, group)


def describe(spec: EngineSpec, facts: ModelFacts, layout: PageLayout, chunk_tokens: int | None = None) -> EngineInfo:
    """What a process says of what it has loaded."""
    return EngineInfo(
        model=facts.model,
        fingerprint=facts.fingerprint,
        layers=facts.layers,
        kv_heads=facts.kv_heads,
        head_dim=facts.head_dim,
        vocab_size=facts.vocab_size,
        eos_token_ids=facts.eos_token_ids,
        max_model_len=facts.max_model_len,
        order=layout.order,
        pages=layout.pages,
        page_size=layout.page_size,
        element_size=layout.element_size,
        dtype=spec.dtype,
        max_batch=spec.max_batch,
        pid=os.getpid(),
        chunk_tokens=chunk_tokens,
        rank=spec.rank,
        ranks=spec.ranks,
    )


def _log_untyped(what: str, error: Exception) -> None:
    """The worker tells a typed error in full; of another the place matters too."""
    if not hasattr(error, "reason"):
        logger.error("%s", what, exc_info=error)


def _reason(error: Exception) -> str:
    """The error's own reason; for one that has none, its class's name: RUNTIME_ERROR."""
    return str(getattr(error, "reason", "")) or re.sub(r"(?<!^)(?=[A-Z][a-z])", "_", type(error).__name__).upper()


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__


def main(argv: Sequence[str] | None = None, load_model: LoadModel | None = None) -> int:
    """Runs the process; `load_model` replaces the loader of real models."""
    parser = argparse.ArgumentParser(description="Holds a model for a worker, which starts it.")
    parser.add_argument("--fd", type=int, required=True, help="the socket to the worker")
    parser.add_argument("--group", type=int, help="what the ranks of the engine meet in, if it has several")
    parser.add_argument("--parent", type=int, required=True, help="the worker's process id")
    options = parser.parse_args(argv)
    logging.basicConfig(format="%(levelname)s %(message)s")
    try:
        die_with_parent(options.parent)
    except Orphaned as error:
        logger.error("%s", error)
        return 1
    # Ctrl-C in a terminal reaches the whole group; the worker decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    worker = socket.socket(fileno=options.fd)
    worker.set_inheritable(False)
    if options.group is not None:
        os.set_inheritable(options.group, False)
    try:
        ModelProcess(worker, load_model or _load_checkpoint, options.group).run()
    except (FrameInvalid, msgspec.MsgspecError) as error:
        logger.error("the worker sent garbage: %s", error)
        return 1
    return 0


if __name__ == "__main__":
    # Without the interpreter's teardown, which takes torch a good part of a second.
    code = main()
    logging.shutdown()
    os._exit(code)
