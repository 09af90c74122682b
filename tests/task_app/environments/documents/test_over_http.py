"""Documents over HTTP: a script reads them with single calls, and answers."""

import re
from typing import Any

from task_app.plugins import default_plug_boards
from tests.task_app.counting import running_app
from tests.task_app.playing import post

# 50 chunks of 400 characters.
GENERATE = {"kind": "hops", "hops": 3, "chars": 20_000}


class Reader:
    """Follows the parcel with searchEngine and readChunk, and writes down what it finds."""

    def __init__(self, client: Any, env_id: str) -> None:
        self._client, self._env_id = client, env_id

    async def call(self, tool: str, **args: Any) -> dict[str, Any]:
        calls = [{"tool": tool, "args": args}]
        return await post(self._client, "/env/step", env_id=self._env_id, tool_calls=calls)

    async def text(self, tool: str, **args: Any) -> str:
        answer = await self.call(tool, **args)
        assert answer["info"]["invalid_reason"] is None
        return answer["info"]["tool_result"]

    async def fact(self, pattern: str, keyword: str) -> str | None:
        """What the pattern captures in the chunks that hold the words; each is read when it is needed."""
        for chunk_id in re.findall(r"^chunk (\d+):", await self.text("searchEngine", keyword=keyword), re.M):
            chunk = await self.text("readChunk", chunk_id=int(chunk_id))
            if found := re.search(pattern, " ".join(chunk.split())):
                return found.group(1)
        return None

    async def play(self, question: str) -> dict[str, Any]:
        await self.text("buildIndex", chunk_size=400, overlap=60)
        holder = question.split()[0]
        while taker := await self.fact(rf"{holder} gave the parcel to (\w+)\.", f"{holder} gave parcel"):
            await self.text("note", key=holder, summary="gave it to", content=taker)
            holder = taker
        locker = await self.fact(rf"{holder} has locker (\d+)\.", f"{holder} has locker")
        return await self.call("finish", answer=f"The {locker}.")


async def test_a_script_answers_questions_of_several_hops_about_documents_of_50_chunks():
    async with running_app(default_plug_boards()) as client:
        for seed in range(5):
            made = await post(
                client, "/env/create", env_name="documents", seed=seed, config={"generate": GENERATE}
            )
            question = made["observation"]["text"].removeprefix("Question: ")
            last = await Reader(client, made["env_id"]).play(question)
            assert (last["terminated"], last["reward"]) == (True, 1.0), f"seed {seed}: {question}"


async def test_a_document_of_a_data_row_is_read_and_what_is_wrong_with_it_is_told():
    row = {"document_content": "The harbour is red.", "question": "Colour?", "ground_truth": "red"}
    async with running_app(default_plug_boards()) as client:
        made = await post(client, "/env/create", env_name="documents", seed=0, config=row)
        reader = Reader(client, made["env_id"])
        assert await reader.text("loadDocument") == "The harbour is red."
        assert (await reader.call("finish", answer="red"))["reward"] == 1.0
        body = {"env_name": "documents", "seed": 0, "config": {**row, "ground_truth": ["!"]}}
        refused = await client.post("/env/create", json=body)
        assert refused.status_code == 422
        assert refused.json()["where"] == "config.ground_truth.0"
