"""A taskset of `verifiers` with tools, whose server keeps the state of the episode: buy what is asked for."""

import verifiers.v1 as vf


class Bought(vf.State):
    items: list[str] = []  # noqa: RUF012  (a pydantic field)


class ShopTools(vf.ToolsetConfig):
    pass


class Shop(vf.Toolset[ShopTools, Bought]):
    TOOL_PREFIX = None

    @vf.tool
    async def price(self, item: str) -> str:
        """The price of an item."""
        return f"{item} costs {len(item)}"

    @vf.tool
    async def buy(self, item: str) -> str:
        """Buy an item."""
        self.state.items.append(item)
        return f"bought {len(self.state.items)}"


class ShopConfig(vf.TaskConfig):
    tools: ShopTools = ShopTools()


class ShopData(vf.TaskData):
    item: str


class ShopTask(vf.Task[ShopData, Bought, ShopConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Shop(config.tools)]

    @vf.reward
    async def bought(self, trace) -> float:
        return float(trace.state.items.count(self.data.item))


class ShopTasksetConfig(vf.TasksetConfig):
    task: ShopConfig = ShopConfig()


class ShopTaskset(vf.Taskset[ShopTask, ShopTasksetConfig]):
    def load(self):
        for item in ("nut", "screw"):
            data = ShopData(prompt=f"Buy a {item}.", system_prompt="Serve.", item=item)
            yield ShopTask(data, self.config.task)


__all__ = ["ShopTaskset"]

if __name__ == "__main__":
    Shop.run()
