"""Tables of a job whose keys are read by built-in or other plug-ins, such as estimators and losses.

If a plug-in NAME reads keys that the table TABLE does not declare, a job sets them in `[TABLE.NAME]`.
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self, TypeVar

from pydantic import (
    BaseModel,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    create_model,
    model_validator,
)

from trainer_backend.core.keys import Table
from trainer_backend.plugins import OPEN_BOARDS, READ_BY

Keys = TypeVar("Keys", bound=Table)


class PlugTable(Table, extra="allow"):
    """A table whose keys are read by plug-ins.

    If `looks_only` is true in the validation's context, the job's own plug-ins are not loaded. In this case,
    `[TABLE.NAME]` may contain any keys if NAME is unknown.
    """

    # The keys, such as algorithm.loss, that choose the plug-ins that read this table.
    boards: ClassVar[tuple[str, ...]]

    @model_validator(mode="wrap")
    @classmethod
    def _mount(cls, data: Any, build: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        """Validate the table and each `[TABLE.NAME]` inside it; one error reports the faults of all."""
        own, faults = {}, []
        looks_only = bool(info.context and info.context.get("looks_only"))
        try:
            table = build(data)
        except ValidationError as error:
            faults += error.errors(include_url=False)
        for name in data if isinstance(data, dict) else ():
            if name in cls.model_fields:
                continue
            kind = own_table(cls, name)
            if kind is None:
                if not (looks_only and isinstance(data[name], dict)):  # of a plug-in that is not loaded
                    faults.append({"type": "extra_forbidden", "loc": (name,), "msg": "", "input": data[name]})
                continue
            try:
                own[name] = kind.model_validate(data[name]).model_dump()
            except ValidationError as error:
                faults += [{**item, "loc": (name, *item["loc"])} for item in error.errors(include_url=False)]
        if faults:
            raise ValidationError.from_exception_data(cls.__name__, faults)  # type: ignore[arg-type]
        (table.model_extra or {}).update(own)
        return table

    def own(self, name: str) -> dict[str, Any]:
        """Return the values of `[TABLE.NAME]`; empty if the job has no such table."""
        return dict((self.model_extra or {}).get(name, {}))

    def read(self, kind: type[Keys], name: str) -> Keys:
        """Return the keys of the plug-in `name`, as an object of its class of keys (`kind`).

        The object is this table itself if the table derives from `kind`. Otherwise the keys that this table
        declares are taken from it, and the others from `[TABLE.NAME]`.
        """
        if isinstance(self, kind):
            return self
        shared = {key: getattr(self, key) for key in kind.model_fields if key in type(self).model_fields}
        own = {key: value for key, value in self.own(name).items() if key in kind.model_fields}
        return kind(**shared | own)


def find_refused_keys(tables: Mapping[str, Table | None]) -> Iterator[tuple[str, str]]:
    """Check the chosen plug-ins' keys; yield `TABLE.NAME` and a sentence for each value that is refused.

    Args:
        tables: the tables of the job, by name.
    """
    for board, plugs in OPEN_BOARDS.items():
        table, _, key = board.partition(".")
        host, name = tables[READ_BY[board]], getattr(tables[table], key, "")
        # A schedule checks its arguments itself, when it is constructed.
        if name in plugs and isinstance(host, PlugTable) and READ_BY[board] != "rollout_allocation_schedule":
            try:
                host.read(plugs[name].keys, name)
            except ValidationError as error:
                for item in error.errors(include_url=False):
                    place = ".".join(map(str, item["loc"])) or name
                    yield f"{READ_BY[board]}.{name}", f"{board} = {name!r}: {place}: {item['msg']}"


def find_unread_tables(tables: Mapping[str, Table | None]) -> Iterator[tuple[str, str, str]]:
    """Find each `[TABLE.NAME]` that nothing reads, because the job does not choose the plug-in NAME.

    Yields tuples: the key that chooses a plug-in, such as algorithm.loss; `TABLE.NAME`; and a sentence.
    """
    chosen: dict[tuple[str, str], str] = {}
    for board in OPEN_BOARDS:
        table, _, key = board.partition(".")
        chosen[READ_BY[board], getattr(tables[table], key, "")] = board
    for home, host in tables.items():
        for name in host.model_extra or () if host is not None else ():
            if (home, name) not in chosen:
                choices = ", ".join(
                    f"{board} = {other!r}" for (table, other), board in chosen.items() if table == home
                )
                board = next(board for (table, _), board in chosen.items() if table == home)
                yield board, f"{home}.{name}", f"[{home}.{name}] is not read by {choices}"


def own_tables(table: type[BaseModel]) -> Iterator[tuple[str, type[Table], list[str]]]:
    """Yield the name of each plug-in that reads a `[TABLE.NAME]`, its class of keys, and the table's keys."""
    if not issubclass(table, PlugTable):
        return
    for board in table.boards:
        for name, plug in OPEN_BOARDS[board].items():
            if own := [key for key in plug.keys.model_fields if key not in table.model_fields]:
                yield name, plug.keys, own


def own_table(table: type[BaseModel], name: str) -> type[Table] | None:
    """Return a new class for `[TABLE.NAME]`, or None if no plug-in of that name has keys of its own."""
    own = [(kind, key) for plug, kind, keys in own_tables(table) if plug == name for key in keys]
    fields = {key: (kind.model_fields[key].annotation, kind.model_fields[key]) for kind, key in own}
    if not fields:
        return None
    return create_model(own[0][0].__name__, __base__=Table, **fields)  # type: ignore[call-overload,no-any-return]
