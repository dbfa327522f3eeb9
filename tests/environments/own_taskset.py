"""A taskset of verifiers, made with its classes: products, with a tool that multiplies and counts its calls."""

import verifiers.v1 as vf

__all__ = ["Products"]


class Product(vf.TaskData):
    answer: int


class Calls(vf.State):
    calls: int = 0
    begun: bool = False


class Multiply(vf.Toolset[vf.ToolsetConfig, Calls]):
    async def setup_task(self, task):
        self.largest = task.answer

    @vf.tool
    async def product(self, a: int, b: int = 1) -> int:
        """Multiply two numbers.

        Args:
            a: The first one.
            b: The second one.
        """
        if a * b > self.largest:
            raise ValueError("Too large.")
        self.state.calls += 1
        return a * b


class Shared(vf.Toolset[vf.SharedToolsetConfig, Calls]):
    TOOL_PREFIX = None
    made = 0

    async def setup(self):
        Shared.made += 1

    @vf.tool
    async def hint(self) -> str:
        """Say how often tools were called."""
        return f"{self.state.calls} calls"


class ProductTask(vf.Task[Product, Calls]):
    async def setup(self, trace, runtime):
        trace.state.begun = True

    async def finalize(self, trace):
        trace.info["finished"] = True

    @vf.reward(weight=2.0)
    async def right(self, trace) -> float:
        return float(trace.last_reply == str(self.data.answer) and trace.state.begun and trace.info["finished"])

    @vf.reward(weight=0.5)
    async def answered(self, trace) -> float:
        asked = [call.id for message in trace.assistant_messages for call in message.tool_calls or []]
        return float(bool(asked) and asked == [message.tool_call_id for message in trace.tool_messages])

    @vf.metric
    async def calls(self, trace) -> float:
        return trace.state.calls

    @classmethod
    def toolsets(cls, config):
        return [Multiply(vf.ToolsetConfig())]


class Sandboxed(vf.Task[Product]):
    @vf.reward
    async def files(self, runtime) -> float:
        return float(await runtime.read("answer.txt") == b"1")


class Guarded(vf.Task[Product]):
    NEEDS_CONTAINER = True


class ProductsConfig(vf.TasksetConfig):
    kind: str = "tools"
    size: int = 3


class Products(vf.Taskset[ProductTask, ProductsConfig]):
    def load(self):
        cls = {"sandbox": Sandboxed, "container": Guarded}.get(self.config.kind, ProductTask)
        for n in range(self.config.size):
            system = "Multiply." if n else None
            prompt = [vf.UserMessage(content=f"{n} * 3 =")] if n else "0 * 3 ="
            yield cls(Product(prompt=prompt, system_prompt=system, answer=n * 3), self.config.task)

    @classmethod
    def toolsets(cls, config):
        return [Shared(vf.SharedToolsetConfig())] if config.kind == "tools" else []
