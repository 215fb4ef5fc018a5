"""A model process that computes nothing: a test says how each step ends."""

import asyncio
import dataclasses
import itertools
from typing import Any

from baton_engine.errors import AttachFailed, EngineDied, StepFailedError
from baton_engine.messages import AgentLost, EngineInfo, EngineSpec, PositionLogprobs, StepPlan, StepResult
from conditions import until

INFO = EngineInfo(
    model="fake",
    fingerprint="f00d",
    layers=2,
    kv_heads=2,
    head_dim=4,
    vocab_size=100,
    eos_token_ids=(99,),
    max_model_len=64,
    order="HND",
    pages=16,
    page_size=4,
    element_size=4,
    dtype="float32",
    max_batch=4,
    chunk_tokens=8,
    pid=1,
)
_start = itertools.count(1_000_000_000, 10_000_000)


def result_of(plan: StepPlan, token: int = 1, logprobs: PositionLogprobs | None = None) -> StepResult:
    """`token` for every sequence that samples; the step took 5 ms."""
    samples = sum(item.sample for item in plan.items)
    begun = next(_start)
    return StepResult(
        step=plan.step,
        token_ids=(token,) * samples,
        logprobs=(logprobs,) * samples if logprobs else (),
        started_ns=begun,
        forward_ns=begun,
        forwarded_ns=begun + 4_000_000,
        finished_ns=begun + 5_000_000,
        layer_ends_ns=(begun + 1, begun + 2),
    )


class FakeEngine:
    """Stands in for EngineClient. With `automatic` every step draws `token`; otherwise the test ends each step."""

    def __init__(self, *, automatic: bool = False, agent: Any = None, **info: Any) -> None:
        self.info = EngineInfo(**{**{f: getattr(INFO, f) for f in INFO.__struct_fields__}, **info})
        self.exited: asyncio.Future[EngineDied] = asyncio.get_running_loop().create_future()
        self.automatic = automatic
        self.token = 1
        self.logprobs: PositionLogprobs | None = None
        self.agent = agent
        self.attached: list[int] = []
        self.attach_failures = 0
        self.on_agent_lost: Any = None
        self.plans: list[StepPlan] = []
        self.stopped = False
        self._ending: asyncio.Future[StepResult] | None = None

    async def attach(self, handoff_path: str, session: int) -> None:
        if self.exited.done():
            raise self.exited.result()
        if self.attach_failures:
            self.attach_failures -= 1
            raise AttachFailed("refused", cause="TEST", session=session)
        self.attached.append(session)
        if self.agent is not None:
            self.agent.hand_over(session)

    async def step(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        if self.exited.done():
            raise self.exited.result()
        if self.automatic:
            await asyncio.sleep(0)
            return result_of(plan, self.token, self.logprobs)
        self._ending = asyncio.get_running_loop().create_future()
        return await self._ending

    async def stop(self, *, grace_s: float = 5.0) -> None:
        self.stopped = True
        self.die("was stopped")

    # --- the test's part ---------------------------------------------------------------------------------------------

    async def begun(self, step: int) -> StepPlan:
        """The plan of this step, once it runs."""
        await until(lambda: len(self.plans) > step and (self.automatic or self.running), f"step {step}")
        return self.plans[step]

    @property
    def running(self) -> bool:
        return self._ending is not None and not self._ending.done()

    def finish(self, token: int = 1) -> None:
        self._ending.set_result(result_of(self.plans[-1], token, self.logprobs))

    def fail(self, error: Exception | None = None) -> None:
        plan = self.plans[-1]
        self._ending.set_exception(error or StepFailedError(f"step {plan.step} failed: test", step=plan.step))

    def die(self, how: str = "was killed by SIGKILL") -> None:
        if not self.exited.done():
            self.exited.set_result(EngineDied(f"model process 1 {how}"))
        if self.running:
            self._ending.set_exception(EngineDied(f"model process 1 {how}"))

    def lose_agent(self) -> None:
        self.on_agent_lost(AgentLost(self.attached[-1]))


@dataclasses.dataclass
class Engines:
    """Replaces EngineClient.start: every start makes the next FakeEngine, with the arguments given here."""

    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    made: list[FakeEngine] = dataclasses.field(default_factory=list)
    specs: list[EngineSpec] = dataclasses.field(default_factory=list)
    failures: list[Exception] = dataclasses.field(default_factory=list)

    async def start(self, spec: EngineSpec, *, on_progress: Any, on_agent_lost: Any, timeout_s: float) -> FakeEngine:
        self.specs.append(spec)
        if self.failures:
            raise self.failures.pop()
        engine = FakeEngine(**self.arguments)
        engine.on_agent_lost = on_agent_lost
        self.made.append(engine)
        return engine

    @property
    def last(self) -> FakeEngine:
        return self.made[-1]
