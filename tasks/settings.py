"""Settings: the only reader of the environment and of config files.

For every value the first of these wins: an option, a `WEIGHBRIDGE_*` variable,
`weighbridge.toml` in the current folder, `config.toml` in the user's config
folder, the default. Does not know Prefect: which API a flow reports to is
decided where flows are started.
"""

import json
import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import unquote

from pydantic import Field, PrivateAttr, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from weighbridge.db.errors import StoreUnavailable
from weighbridge.db.location import display_url, sqlite_url
from weighbridge.tasks.errors import SettingsError

ENV_PREFIX = "WEIGHBRIDGE_"
PROJECT_FILE = "weighbridge.toml"
OPTION = "option"
DEFAULT = "default"

_RULES = {
    "database_url": "a database URL such as sqlite:///answers.db, or the path of a SQLite file",
    "checkpoint": "a checkpoint folder or a hub id",
    "adapter": "an adapter's folder or a hub id",
    "cache": "a folder",
    "lease": "the path of a file",
    "accept_prompt": "true or false",
    "allow_remote_api": "true or false",
}


class Settings(BaseSettings):
    """The settings of one process; made by `load_settings`, which reads the layers.

    Attributes:
        database_url: Where the answers are kept, as a database URL. A path is
            accepted too; a relative one starts at the current folder.
        checkpoint: Folder or hub id of the model; None means the embedded one.
        adapter: Folder or hub id of a LoRA adapter of that checkpoint.
        cache: Folder for what can be made again: the embedded checkpoint, logs.
        lease: File whose lock lets one process of this machine hold a model.
        accept_prompt: Consent to a system text that is not the one a checkpoint was
            trained with.
        allow_remote_api: Consent to report runs to a Prefect API that is not
            on this machine.
    """

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_ignore_empty=True, extra="forbid", frozen=True
    )

    # The titles are the defaults, and the descriptions the meanings, as README shows them.
    database_url: str = Field(
        default_factory=lambda: as_database_url(str(user_folder("data") / "weighbridge.db")),
        title="a file in your data folder",
        description="the store, a file or a database URL; also `--db`",
    )
    checkpoint: str | None = Field(
        default=None,
        title="the embedded model",
        description="a checkpoint folder or a hub id; also `--checkpoint`",
    )
    adapter: str | None = Field(
        default=None,
        title="none",
        description="an adapter's folder or hub id, for that checkpoint; also `--adapter`",
    )
    cache: Path = Field(
        default_factory=lambda: user_folder("cache"),
        title="your cache folder",
        description="the embedded model, logs",
    )
    lease: Path = Field(
        default_factory=lambda: user_folder("cache") / "accelerator.lock",
        title="a file in your cache folder",
        description="the lock that lets one program of this machine hold a model",
    )
    accept_prompt: bool = Field(
        default=False,
        title="false",
        description="consent to another system text than the one that a model was trained with; "
        "also `--accept-prompt`",
    )
    allow_remote_api: bool = Field(
        default=False,
        title="false",
        description="consent to a Prefect API on another machine; also `--allow-remote-api`",
    )

    _origins: dict[str, str] = PrivateAttr(default_factory=dict[str, str])

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Take only what `load_settings` merged, so that each value has one known origin."""
        del settings_cls, env_settings, dotenv_settings, file_secret_settings
        return (init_settings,)

    @field_validator("database_url")
    @classmethod
    def _absolute_url(cls, value: str) -> str:
        return as_database_url(value)

    @field_validator("checkpoint", "adapter")
    @classmethod
    def _expanded(cls, value: str | None) -> str | None:
        if value is None:
            return None
        return str(_absolute(value)) if value.startswith("~") else _not_blank(value)

    @field_validator("cache", "lease", mode="before")
    @classmethod
    def _absolute_folder(cls, value: object) -> object:
        return _absolute(_not_blank(value)) if isinstance(value, str) else value

    @classmethod
    def from_layers(cls, layers: Sequence[tuple[str, Mapping[str, Any]]]) -> Self:
        """Merge named layers of raw values, the first layer winning.

        An adapter counts only with the checkpoint of its layer or of a later one.

        Raises:
            SettingsError: A key is unknown or a value has the wrong type.
        """
        values: dict[str, Any] = {}
        origins: dict[str, str] = {}
        for layer, found in reversed(layers):
            if "checkpoint" in found:
                values.pop("adapter", None)  # that of a checkpoint which does not count
                origins.pop("adapter", None)
            for name, value in found.items():
                values[name] = value
                origins[name] = f"{ENV_PREFIX}{name.upper()}" if layer == ENV_PREFIX else layer
        try:
            settings = cls(**values)
        except ValidationError as error:
            raise _explained(error, origins) from error
        settings._origins = origins
        return settings

    def origin(self, name: str) -> str:
        """Return where a value came from.

        Returns:
            `option`, `default`, the name of the variable, or the path of the file.
        """
        return self._origins.get(name, DEFAULT)

    def described(self) -> dict[str, dict[str, Any]]:
        """Return value and origin of each setting, as JSON, without what may hold a password."""
        values = self.model_dump(mode="json")
        values["database_url"] = _shown_url(self.database_url)
        return {name: {"value": values[name], "origin": self.origin(name)} for name in values}


def load_settings(
    *,
    database_url: str | None = None,
    checkpoint: str | None = None,
    adapter: str | None = None,
    cache: Path | None = None,
    allow_remote_api: bool | None = None,
) -> Settings:
    """Merge options, environment and config files; remember where each value came from.

    Args:
        database_url: The option's value, a URL or a path; None when not given.
        checkpoint: The same for the checkpoint.
        adapter: The same for its adapter.
        cache: The same for the cache folder.
        allow_remote_api: The same for the consent.

    Raises:
        SettingsError: A file is not TOML, a key is unknown, a value has the
            wrong type; names the file or the variable.
    """
    options = {
        "database_url": database_url,
        "checkpoint": checkpoint,
        "adapter": adapter,
        "cache": cache,
        "allow_remote_api": allow_remote_api,
    }
    layers = [
        (OPTION, {name: value for name, value in options.items() if value is not None}),
        (ENV_PREFIX, EnvSettingsSource(Settings)()),
        *((str(path), _read_toml(path)) for path in config_files()),
    ]
    return Settings.from_layers(layers)


def config_files() -> tuple[Path, ...]:
    """Return the config files that count, whether they exist or not; the first one wins."""
    return Path.cwd() / PROJECT_FILE, user_folder("config") / "config.toml"


def unknown_variables() -> list[str]:
    """Return the `WEIGHBRIDGE_*` variables that no setting has, which are often typing errors."""
    known = {f"{ENV_PREFIX}{name}".upper() for name in Settings.model_fields}
    return sorted(
        name for name in os.environ if name.startswith(ENV_PREFIX) and name.upper() not in known
    )


def user_folder(kind: Literal["data", "cache", "config"]) -> Path:
    """Return the folder of weighbridge for this user: XDG folders, or `~/Library` on macOS.

    Raises:
        SettingsError: The user has no home folder.
    """
    try:
        home = Path.home()
    except RuntimeError as error:
        raise SettingsError(
            "the user must have a home folder, and the system names none",
            hint="set HOME, or WEIGHBRIDGE_DATABASE_URL and WEIGHBRIDGE_CACHE",
        ) from error
    if sys.platform == "darwin":
        library = home / "Library"
        return library / ("Caches" if kind == "cache" else "Application Support") / "weighbridge"
    fallback = {"data": ".local/share", "cache": ".cache", "config": ".config"}[kind]
    # The XDG specification: a relative path is invalid and must be ignored.
    named = Path(os.environ.get(f"XDG_{kind.upper()}_HOME", ""))
    return (named if named.is_absolute() else home / fallback) / "weighbridge"


def as_database_url(value: str) -> str:
    """Turn the path of a SQLite file into a URL; make SQLite URLs absolute.

    Absolute because a worker may run the flow in another folder.

    Raises:
        ValueError: The value is blank.
    """
    value = _not_blank(value)
    if "://" not in value:
        return sqlite_url(_absolute(value))
    scheme, _, rest = value.partition(":///")
    path, mark, query = rest.partition("?")
    if scheme not in {"sqlite", "sqlite+pysqlite"} or not path or path.startswith((":", "file:")):
        return value
    return f"{sqlite_url(_absolute(unquote(path)))}{mark}{query}"


def _shown_url(url: str) -> str:
    try:
        return display_url(url)
    except StoreUnavailable as error:
        return f"(not shown: {error.message})"


def _absolute(path: str) -> Path:
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError as error:  # no such user after "~"
        raise ValueError(str(error)) from error


def _not_blank(value: str) -> str:
    if not value.strip():
        raise ValueError("blank")
    return value


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise SettingsError(f"{path} must be a readable file, got: {error.strerror}") from error
    except ValueError as error:
        raise SettingsError(
            f"{path} must be TOML in UTF-8, got: {error}",
            hint='one setting a line, for example: checkpoint = "/models/nimble"',
        ) from error


def _explained(error: ValidationError, origins: dict[str, str]) -> SettingsError:
    first = error.errors()[0]
    name = str(first["loc"][0])
    origin = origins.get(name, DEFAULT)
    if first["type"] == "extra_forbidden":
        known = ", ".join(Settings.model_fields)
        return SettingsError(
            f"{origin} must hold only known settings, got {json.dumps(name)}",
            hint=f"known settings: {known}",
        )
    where = origin if origin.startswith(ENV_PREFIX) else f"{name} ({origin})"
    return SettingsError(f"{where} must be {_RULES[name]}, got {_shown(first['input'])}")


def _shown(value: object) -> str:
    text = json.dumps(value, default=str)
    return "a URL" if "://" in text else text  # which may hold a password
