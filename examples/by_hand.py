"""Plays one episode of three decisions in this process, with a policy of your own and without a service."""

import asyncio

from turnwise import AgentPolicy, RLRolloutWorker, TaskDefinitionModel


class Wanderer(AgentPolicy):
    async def get_action(self, observation, available_tools_specs=None):
        print(observation[-1].content.splitlines()[0])
        moves = ["move_right", "move_down"]
        call = {"type": "tool_call", "name": "interact_many", "arguments": {"actions": moves}}
        return call, None, None, None


task = TaskDefinitionModel(resource_type="crafter", ground_truth={"for": "the reward function"})
steps, messages, ground_truth = asyncio.run(RLRolloutWorker(task, Wanderer(), 3).run_episode())
print(len(steps), "decisions,", sum(sum(step.env_rewards) for step in steps), "of reward")
