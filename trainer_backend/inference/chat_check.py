"""Can a model hold the conversations of a job? A probe through its chat template, before anything else."""

from transformers import PreTrainedTokenizerFast

from trainer_backend.errors import BadChatRequest, ModelFolderError
from trainer_backend.inference.rendering import ChatRenderer
from trainer_backend.inference.tool_formats.reading import ParsedCall
from trainer_backend.inference.tool_parsing import tool_format_of
from trainer_backend.plugins import TOOL_FORMATS

NAME = "turnwise_probe"
SCHEMA = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}
TOOLS = [
    {"type": "function", "function": {"name": NAME, "description": "Takes a word.", "parameters": SCHEMA}}
]
CALL = ParsedCall(NAME, '{"word": "tree"}')
ASKED = [{"role": "system", "content": "You play."}, {"role": "user", "content": "Say tree."}]
_FUNCTION = {"name": CALL.name, "arguments": CALL.arguments}
ANSWER = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "call_0", "type": "function", "function": _FUNCTION}],
}


def refuse_without_tools(tokenizer: PreTrainedTokenizerFast) -> None:
    """Environments ask with a system and a user message and offer tools: the template must carry all of it.

    It must show a tool to the model, and write a call so that the model's tool-call format reads it back:
    the warm-up teaches calls as the template writes them, and the gateway reads them in that format.

    Raises:
        ModelFolderError: no template, one that raises, one without tools, or no known format.
    """
    where = f"the chat template of {tokenizer.name_or_path or 'the tokenizer'}"
    renderer, name = ChatRenderer(tokenizer), tool_format_of(tokenizer)
    try:
        # The presets never see a tool: what they may call they learn in the warm-up.
        if name != "turnwise" and NAME not in renderer.prompt_text(ASKED, TOOLS):
            raise ModelFolderError(
                "it shows no tools to the model, and the environments answer to tool calls alone",
                where=where,
                hint="Take an instruction-tuned model with tool calling, or a template that prints `tools`.",
            )
        answer = renderer.answer_text(ASKED, ANSWER, TOOLS)
    except BadChatRequest as error:
        raise ModelFolderError(
            f"it refuses a system message, a user message and a call: {error.detail}", where=where
        ) from error
    if answer is None:
        raise ModelFolderError(
            "it does not continue its own prompts, so what the model has to write cannot be told from it",
            where=where,
            hint="Some do without thinking: model.chat_template_kwargs = { enable_thinking = false }.",
        )
    _refuse_unread_call(answer.removesuffix(tokenizer.eos_token or ""), name, where=where)


def _refuse_unread_call(answer: str, name: str | None, *, where: str) -> None:
    readers = [
        known for known, form in TOOL_FORMATS.items() if form.parse(answer, TOOLS).tool_calls == (CALL,)
    ]
    if name in readers:
        return
    otherwise = "in no format that is known here" if name is None else f"otherwise than {name!r} reads it"
    raise ModelFolderError(
        f"it writes a call {otherwise}: {answer!r:.200}",
        where=where,
        hint=f"Set model.tool_call_format to {readers[0]!r}."
        if readers
        else f"Known are {', '.join(TOOL_FORMATS)}.",
    )
