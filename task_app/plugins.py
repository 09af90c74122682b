"""The registries of plug-ins ("plug boards"): they map each name that requests may use to a plug-in.

To add a built-in policy, add an entry to `POLICIES`. To add a built-in environment, add a file to
`environments/`.
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
    """The class and config of an interaction, from which each episode builds its own object."""

    name: str
    kind: type[BaseInteraction]
    config: Mapping[str, Any]

    @property
    def never_blocks(self) -> bool:
        """Whether the class promises not to block. If so, it runs on the service's event loop."""
        return bool(getattr(self.kind, "never_blocks", False))

    @property
    def ground_truth_is_number(self) -> bool:
        """Whether an interaction with this config accepts only data rows whose `ground_truth` is a number."""
        check = getattr(self.kind, "ground_truth_is_number", None)
        return callable(check) and bool(check(self.config))

    def build(self) -> BaseInteraction:
        """Return a new interaction for one episode. Its config also contains its name as "name"."""
        return self.kind({**deepcopy(dict(self.config)), "name": self.name})


def validate_config(model: type[B], config: Mapping[str, Any]) -> B:
    """Return the config of a built-in interaction as an instance of `model`, without the key "name".

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
    """Returns the service's HTTP session; the first call creates the session."""
    client: HttpClient | None = None
    """Client for requests to model servers; if None, each request opens a new connection."""
    rollout_id: str | None = None
    inference_key: SecretStr | None = None
    on_retry: Callable[[], None] = lambda: None
    threads: Threads | None = None
    boards: "PlugBoards | None" = None
    """The registries, for a policy that builds another policy."""
    seed: int | None = None
    """Default of the setting "seed" in the policy's config; ignored if the config has no such setting."""

    @property
    def session(self) -> "aiohttp.ClientSession":
        """The service's HTTP session, for requests that a plug-in sends itself."""
        return self.open_session()


@dataclass(frozen=True, slots=True)
class EnvironmentPlugin(Generic[C]):
    """The config class, the constructor and the state keys of an environment.

    `build` must be fast; slow work, such as generating a world, belongs in `reset`. A state key decides which
    states count as equal; the first of `state_keys` is the default.
    """

    config: type[C]
    build: Callable[[C], Environment]
    state_keys: Mapping[str, StateKey] = field(default_factory=dict)
    needs: str | None = None
    """Name of the optional package without which the environment cannot run; None if there is none."""


@dataclass(frozen=True, slots=True)
class PolicyPlugin(Generic[C]):
    """The config class and the constructor of a policy; `defaults` makes config values from `Settings`."""

    config: type[C]
    build: Callable[[C, PolicyContext], AgentPolicy]
    defaults: Callable[[Settings], Mapping[str, Any]] = lambda settings: {}


@dataclass(frozen=True, slots=True)
class RewardPlugin:
    """The mode of a reward function, and where a child process finds the function."""

    mode: RewardMode
    source: str
    """Path of a file that defines REWARD_FUNCTIONS, or `module:function` in an installed package."""


P = TypeVar("P")


class Board(Mapping[str, P]):
    """A registry that imports a plug-in only when its name is first looked up."""

    def __init__(self, loaders: Mapping[str, Callable[[], P]]) -> None:
        self._loaders = dict(loaders)
        self._loaded: dict[str, P] = {}

    def __getitem__(self, name: str) -> P:
        if name not in self._loaded:
            # If two threads load an entry at the same time, both get the object that was stored first.
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
    """Return the `PLUGIN` in `environments/<name>.py` or `environments/<name>/environment.py`."""
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
        # The teacher gets neither the key nor the rollout id of the model that plays. The teacher's server
        # may belong to another operator, so it must not see the key. At our own gateway, a second
        # conversation with the same rollout id would break the first one.
        teacher_context = replace(context, inference_key=None, rollout_id=None, seed=None)
        teacher = boards.policy(name, config.teacher_config, teacher_context, where="teacher_")
        return LabelledPolicy(config, teacher, **_make_access(context))

    return PolicyPlugin(LabelledConfig, build, _server_defaults)


def _load_policy(module: str, config: str, policy: str) -> Callable[[], PolicyPlugin[Any]]:
    """Return a function that imports a policy without a model and returns its plug-in.

    `module` is a module in task_app.policies; `config` and `policy` are the names of classes in it.
    """

    def load() -> PolicyPlugin[Any]:
        classes = import_module(f"task_app.policies.{module}")
        build: Callable[[Any], AgentPolicy] = getattr(classes, policy)
        return PolicyPlugin(getattr(classes, config), lambda keys, context: build(keys))

    return load


# Requests that name no environment get the first of these.
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

# Names that other Crafter task apps use, in lower case. Requests may use these names too. If a plug-in has
# the same name, requests get the plug-in.
ENVIRONMENT_ALIASES = {"crafterclassic": "crafter", "crafter_classic": "crafter"}
POLICY_ALIASES = {"crafter": "openai", "crafter-react": "openai"}


@dataclass(frozen=True, slots=True)
class PlugBoards:
    """All plug-ins of a task app by their names, and functions that look them up and build them."""

    environments: Mapping[str, EnvironmentPlugin[Any]]
    policies: Mapping[str, PolicyPlugin[Any]]
    reward_functions: Mapping[str, RewardPlugin] = field(default_factory=dict)
    interactions: Mapping[str, InteractionEntry] = field(default_factory=dict)
    reach: Reach = LOCAL
    homes: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """Maps (board, name) of each plug-in that is not built in to its file or package, for error messages."""

    @property
    def playable(self) -> dict[str, EnvironmentPlugin[Any]]:
        """The environments whose optional packages are installed."""
        return {
            name: plugin
            for name, plugin in self.environments.items()
            if plugin.needs is None or find_spec(plugin.needs) is not None
        }

    def environment_name(self, name: str, *, where: str = "") -> str:
        """Return the environment's name on the board for a name or an alias.

        The name of another library's environment, such as `gymnasium:ID`, is returned unchanged. `where` is
        the prefix of the path in errors. Raises UnknownName if no environment has this name.
        """
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
        """Return the policy's name on the board for a name or an alias. Raises UnknownName."""
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
        """Return the state keys that `environment` offers, by name; `env_name` is its own name."""
        own = self.environment_plugin(env_name, where=where).state_keys
        return keys_by_name(own, conversation=isinstance(environment, ConversationalEnvironment))

    def resolve(self, spec: EnvSpec) -> EnvSpec:
        """Return the spec with aliases resolved and all defaults filled in, so that specs can be compared."""
        name = self.environment_name(spec.env_name)
        config = validated(self.environment_plugin(name).config, spec.config, where="config")
        return EnvSpec(env_name=name, config=config.model_dump(mode="json"))

    def policy(
        self, name: str, config: Mapping[str, Any], context: PolicyContext, *, where: str = ""
    ) -> AgentPolicy:
        """Build the policy with this name or alias. Raises InvalidRequest if name or config is invalid."""
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
        """Return the plug-in with this name; for another library's environment, make a new plug-in."""
        on_board = self.environment_name(name, where=where)
        if on_board in self.environments:
            return self.environments[on_board]
        foreign = find_kind(name)
        assert foreign is not None, "environment_name refuses all other names"
        kind, argument = foreign
        return EnvironmentPlugin(kind.config, lambda config: kind.build(argument, config, self.reach))


def _list_seed_names(config: type[Body]) -> set[str]:
    """Return all names and aliases of the config's setting "seed"; empty if there is no such setting."""
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
    """Return the key in `board` for a name or an alias; None if there is no such key."""
    resolved = name if name in board else aliases.get(name.lower(), name)
    return resolved if resolved in board else None


def default_plug_boards() -> PlugBoards:
    return PlugBoards(ENVIRONMENTS, POLICIES, REWARD_FUNCTIONS)
