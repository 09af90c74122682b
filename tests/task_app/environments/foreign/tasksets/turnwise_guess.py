"""A taskset of `verifiers` without an end, whose Env answers as the user: guess a number in a few turns."""

import itertools

import verifiers.v1 as vf


class GuessData(vf.TaskData):
    number: int


class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            turn = await interaction.turn()
            while not turn.terminated and turn.last_reply != str(task.data.number):
                turn = await interaction.turn("wrong")
        interaction.trace.record_reward("turns", 1.0 / interaction.trace.num_turns)


class GuessTask(vf.Task[GuessData, vf.State, vf.TaskConfig]):
    pass


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        for number in itertools.count():
            yield GuessTask(GuessData(prompt="Guess a number.", number=number % 10), self.config.task)


__all__ = ["GuessEnv", "GuessTaskset"]
