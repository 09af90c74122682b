"""The registries of plug-ins ("plug boards"): the names that requests may use, and how to build each.

To add a policy, add an entry here; to add an environment, add a file in `environments/`.
"""

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pydantic import AliasChoices, SecretStr

from service_kit.http_client import HttpClient
from service_kit.plugin_file import built_in_environments
from shared_schemas.base import Body
from shared_schemas.prefixes import PREFIXES, list_prefixes
from shared_schemas.rollouts import EnvSpec
from task_app.complaints import validated
from task_app.environments.foreign.kinds import find_kind
from task_app.environments.foreign.peer import LOCAL
from task_app.episode.state_keys import PromptKey, StateKey, keys_by_name
from task_app.errors import InvalidRequest, TaskAppError, UnknownName, boundary
from task_app.protocols import (
    AgentPolicy,
    BaseInteraction,
    ConversationalEnvironment,
    Environment,
    RewardMode,
)
from task_app.settings import Reach, Settings
from task_app.threads import Threads

if TYPE_CHECKING:  # the imports take a tenth of a second, and the first rollouts may not need them
    import aiohttp

    from task_app.policies.openai import ModelAccess

B = TypeVar("B", bound=Body)


@dataclass(frozen=True, slots=True)
class InteractionEntry:
    """The class and config of an interaction; each episode builds its own object."""

    name: str
    kind: type[BaseInteraction]
    config: Mapping[str, Any]

    @property
    def never_blocks(self) -> bool:
        """Whether the class declares that it never blocks, so that it may run on the service's event loop."""
        return bool(getattr(self.kind, "never_blocks", False))

    @property
    def ground_truth_is_number(self) -> bool:
        """Whether the class, with its config, refuses a row whose `ground_truth` is not a number."""
        check = getattr(self.kind, "ground_truth_is_number", None)
        return callable(check) and bool(check(self.config))

    def build(self) -> BaseInteraction:
        """Build the interaction of one episode; as published, its config also has its name."""
        return self.kind({**deepcopy(dict(self.config)), "name": self.name})


def validate_config(model: type[B], config: Mapping[str, Any]) -> B:
    """Validate the config of a built-in interaction.

    Raises:
        InvalidRequest: a key is unknown, missing or out of bounds.
    """
    return validated(model, {key: value for key, value in config.items() if key != "name"}, where="config")


C = TypeVar("C", bound=Body)


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """The parts of the service that a policy may use, in addition to its config."""

    settings: Settings
    open_session: "Callable[[], aiohttp.ClientSession]"
    """Returns the service's HTTP session, which is made when it is first used."""
    client: HttpClient | None = None
    """Client for requests to model servers; without it, each request opens a connection."""
    rollout_id: str | None = None
    inference_key: SecretStr | None = None
    on_retry: Callable[[], None] = lambda: None
    threads: Threads | None = None
    boards: "PlugBoards | None" = None
    """The registries, for a policy that builds another policy."""
    seed: int | None = None
    """Seed for a policy whose config has one; a job sends it for every policy without a model."""

    @property
    def session(self) -> "aiohttp.ClientSession":
        """The HTTP session for a plug-in's own requests."""
        return self.open_session()


@dataclass(frozen=True, slots=True)
class EnvironmentPlugin(Generic[C]):
    """How to build an environment. Building must be fast: `reset` makes the world. The first state key is the
    default."""

    config: type[C]
    build: Callable[[C], Environment]
    state_keys: Mapping[str, StateKey] = field(default_factory=dict)
    needs: str | None = None
    """The optional package that the environment needs."""


@dataclass(frozen=True, slots=True)
class PolicyPlugin(Generic[C]):
    """How to build a policy; `defaults` come from the operator's settings."""

    config: type[C]
    build: Callable[[C, PolicyContext], AgentPolicy]
    defaults: Callable[[Settings], Mapping[str, Any]] = lambda settings: {}


@dataclass(frozen=True, slots=True)
class RewardPlugin:
    """The mode and the location of a reward function."""

    mode: RewardMode
    source: str
    """A file with REWARD_FUNCTIONS, or `module:function` of an installed package."""


P = TypeVar("P")


class Board(Mapping[str, P]):
    """A registry that loads an entry when it is first looked up, and so imports only requested plug-ins."""

    def __init__(self, loaders: Mapping[str, Callable[[], P]]) -> None:
        self._loaders = dict(loaders)
        self._loaded: dict[str, P] = {}

    def __getitem__(self, name: str) -> P:
        if name not in self._loaded:
            # If two threads load an entry at the same time, both get the first one.
            self._loaded.setdefault(name, self._loaders[name]())
        return self._loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in self._loaders

    def __iter__(self) -> Iterator[str]:
        return iter(self._loaders)

    def __len__(self) -> int:
        return len(self._loaders)


def _make_access(context: PolicyContext) -> "ModelAccess":
    return {
        "client": context.client,
        "allowed_hosts": context.settings.inference_hosts,
        "rollout_id": context.rollout_id,
        "inference_key": context.inference_key,
        "max_reply_bytes": context.settings.max_reply_bytes,
        "on_retry": context.on_retry,
    }


def _server_defaults(settings: Settings) -> dict[str, Any]:
    values = {"inference_url": settings.inference_url, "model": settings.inference_model}
    return {name: value for name, value in values.items() if value is not None}


def _load_crafter() -> EnvironmentPlugin[Any]:
    from task_app.environments.crafter.balrog import BalrogEnvironment
    from task_app.environments.crafter.environment import CrafterConfig, CrafterEnvironment
    from task_app.environments.crafter.state_keys import CRAFTER_STATE_KEYS

    return EnvironmentPlugin(
        CrafterConfig,
        lambda keys: BalrogEnvironment(keys) if keys.text == "balrog" else CrafterEnvironment(keys),
        CRAFTER_STATE_KEYS,
    )


def _load_environment(name: str) -> EnvironmentPlugin[Any]:
    """Return the `PLUGIN` of an environment's file; in a folder this is `environment.py`."""
    module = import_module(f"task_app.environments.{name}")
    if hasattr(module, "__path__"):
        module = import_module(f"{module.__name__}.environment")
    plugin: EnvironmentPlugin[Any] = module.PLUGIN
    return plugin


def _load_openai() -> PolicyPlugin[Any]:
    from task_app.policies.openai import OpenAIAgentPolicy
    from task_app.policies.openai_config import OpenAIConfig

    def build(config: OpenAIConfig, context: PolicyContext) -> AgentPolicy:
        return OpenAIAgentPolicy(config, **_make_access(context))

    return PolicyPlugin(OpenAIConfig, build, _server_defaults)


def _load_labelled() -> PolicyPlugin[Any]:
    from task_app.policies.labelled import LabelledConfig, LabelledPolicy

    def build(config: LabelledConfig, context: PolicyContext) -> AgentPolicy:
        boards = context.boards or default_plug_boards()
        name = boards.policy_name(config.teacher, where="teacher: ")
        # The teacher gets neither the key nor the rollout id of the playing model. Its server may be another
        # operator's, and at our own gateway a second conversation with the same id would break the first.
        teacher_context = replace(context, inference_key=None, rollout_id=None, seed=None)
        teacher = boards.policy(name, config.teacher_config, teacher_context, where="teacher_")
        return LabelledPolicy(config, teacher, **_make_access(context))

    return PolicyPlugin(LabelledConfig, build, _server_defaults)


def _load_policy(module: str, config: str, policy: str) -> Callable[[], PolicyPlugin[Any]]:
    """Make the loader of a policy without a model from the names of its module and classes."""

    def load() -> PolicyPlugin[Any]:
        classes = import_module(f"task_app.policies.{module}")
        build: Callable[[Any], AgentPolicy] = getattr(classes, policy)
        return PolicyPlugin(getattr(classes, config), lambda keys, context: build(keys))

    return load


# Requests that name no environment get the first one.
ENVIRONMENTS: Mapping[str, EnvironmentPlugin[Any]] = Board(
    {"crafter": _load_crafter}
    | {name: partial(_load_environment, name) for name in built_in_environments() if name != "crafter"}
)

POLICIES: Mapping[str, PolicyPlugin[Any]] = Board(
    {
        "openai": _load_openai,
        "labelled": _load_labelled,
        "crafter_teacher": _load_policy("scripted", "TeacherConfig", "CrafterTeacher"),
        "sums_teacher": _load_policy("sums", "SumsTeacherConfig", "SumsTeacher"),
        "documents_teacher": _load_policy("documents", "DocumentsTeacherConfig", "DocumentsTeacher"),
        "sokoban_teacher": _load_policy("teachers", "DetourConfig", "SokobanTeacher"),
        "babyai_teacher": _load_policy("teachers", "DetourConfig", "BabyAITeacher"),
        "orders_teacher": _load_policy("teachers", "DetourConfig", "OrdersTeacher"),
        "random": _load_policy("scripted", "RandomConfig", "RandomPolicy"),
    }
)

# No reward function is built in; the operator's files add them.
REWARD_FUNCTIONS: dict[str, RewardPlugin] = {}

# Names that other Crafter task apps use, in lower case. Requests may use them too; a plug-in with such a name
# has priority.
ENVIRONMENT_ALIASES = {"crafterclassic": "crafter", "crafter_classic": "crafter"}
POLICY_ALIASES = {"crafter": "openai", "crafter-react": "openai"}


@dataclass(frozen=True, slots=True)
class PlugBoards:
    """The plug-ins of a service."""

    environments: Mapping[str, EnvironmentPlugin[Any]]
    policies: Mapping[str, PolicyPlugin[Any]]
    reward_functions: Mapping[str, RewardPlugin] = field(default_factory=dict)
    interactions: Mapping[str, InteractionEntry] = field(default_factory=dict)
    reach: Reach = LOCAL
    homes: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """File or package of each plug-in that is not built in, by board and name, for errors."""

    @property
    def playable(self) -> dict[str, EnvironmentPlugin[Any]]:
        """The environments whose packages are installed."""
        return {
            name: plugin
            for name, plugin in self.environments.items()
            if plugin.needs is None or find_spec(plugin.needs) is not None
        }

    def environment_name(self, name: str, *, where: str = "") -> str:
        """Resolve an alias; the name of another library's environment stays as it is. Raises UnknownName."""
        if name not in self.environments and find_kind(name) is not None:
            return name
        resolved = _resolve_name(name, self.environments, ENVIRONMENT_ALIASES)
        if resolved is not None:
            return resolved
        prefix, colon, _ = name.partition(":")
        kinds = [f"{kind}:" for kind in PREFIXES] if colon else []
        raise UnknownName(
            "environment", name, (*self.environments, *kinds), where=where + "env_name",
            like=prefix + colon,
            hint=f"Environments of other libraries have a prefix: {list_prefixes()} (docs/foreign.md).",
        )  # fmt: skip

    def policy_name(self, name: str, *, where: str = "") -> str:
        """Resolve an alias. Raises UnknownName."""
        resolved = _resolve_name(name, self.policies, POLICY_ALIASES)
        if resolved is None:
            raise UnknownName("policy", name, self.policies, where=where + "policy_name")
        return resolved

    def reward_function(self, name: str, *, where: str = "") -> RewardPlugin:
        plugin = self.reward_functions.get(name)
        if plugin is None:
            raise UnknownName("reward function", name, self.reward_functions, where=where + "reward_function")
        return plugin

    def environment(self, name: str, config: Mapping[str, Any], *, where: str = "") -> Environment:
        plugin = self.environment_plugin(name, where=where)
        settings = validated(plugin.config, config, where=where + "config")
        try:
            with boundary(f"environment {name!r}"):
                return plugin.build(settings)
        except InvalidRequest as exc:
            exc.where = where + (exc.where or "env_name")
            raise

    def state_keys(
        self, env_name: str, environment: Environment, *, where: str = ""
    ) -> dict[str, StateKey | PromptKey]:
        """Return the state keys of an environment that was built by this name."""
        own = self.environment_plugin(env_name, where=where).state_keys
        return keys_by_name(own, conversation=isinstance(environment, ConversationalEnvironment))

    def resolve(self, spec: EnvSpec) -> EnvSpec:
        """Return the spec with every setting filled in, so that equal environments have equal specs."""
        name = self.environment_name(spec.env_name)
        config = validated(self.environment_plugin(name).config, spec.config, where="config")
        return EnvSpec(env_name=name, config=config.model_dump(mode="json"))

    def policy(
        self, name: str, config: Mapping[str, Any], context: PolicyContext, *, where: str = ""
    ) -> AgentPolicy:
        """Build the named policy; `where` is the prefix of the path in errors."""
        plugin = self.policies[self.policy_name(name, where=where)]
        complete = {**plugin.defaults(context.settings), **config}
        seed_names = _list_seed_names(plugin.config)
        if context.seed is not None and seed_names and seed_names.isdisjoint(complete):
            complete["seed"] = context.seed
        settings = validated(plugin.config, complete, where=where + "config")
        try:
            with boundary(f"policy {name!r}"):
                return plugin.build(settings, replace(context, boards=self))
        except TaskAppError as exc:
            exc.where = ".".join(filter(None, [f"{where}config", exc.where]))
            raise

    def environment_plugin(self, name: str, *, where: str = "") -> EnvironmentPlugin[Any]:
        """Return the plug-in of the name, or make one for an environment of another library."""
        on_board = self.environment_name(name, where=where)
        if on_board in self.environments:
            return self.environments[on_board]
        foreign = find_kind(name)
        assert foreign is not None, "environment_name refuses all other names"
        kind, argument = foreign
        return EnvironmentPlugin(kind.config, lambda config: kind.build(argument, config, self.reach))


def _list_seed_names(config: type[Body]) -> set[str]:
    """Return the names by which a config accepts the setting "seed"; empty if it has no such setting."""
    by_name = config.model_config.get("populate_by_name") or config.model_config.get("validate_by_name")
    for name, field_ in config.model_fields.items():
        alias = field_.validation_alias
        choices = alias.choices if isinstance(alias, AliasChoices) else [alias]
        names = {choice for choice in choices if isinstance(choice, str)}
        if alias is None or by_name:
            names.add(name)
        if "seed" in names:
            return names
    return {"seed"} if config.model_config.get("extra") == "allow" else set()


def _resolve_name(name: str, board: Mapping[str, Any], aliases: Mapping[str, str]) -> str | None:
    """Return the name on the board for a name or an alias; None if neither is known."""
    resolved = name if name in board else aliases.get(name.lower(), name)
    return resolved if resolved in board else None


def default_plug_boards() -> PlugBoards:
    return PlugBoards(ENVIRONMENTS, POLICIES, REWARD_FUNCTIONS)
