"""Where settings come from: constructor keywords, then ``HOMEPORT_*``, then a TOML file.

A name that nobody knows is most likely a typing error in a setting that somebody relies on, so it stops the start.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, get_origin

from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

__all__ = ["ENV_PREFIX", "SettingsSource", "env_name", "read_environment", "read_toml", "unknown_name"]

ENV_PREFIX = "HOMEPORT_"


def env_name(field: str) -> str:
    """The environment variable of a setting."""
    return ENV_PREFIX + field.upper()


def unknown_name(name: str, known: Collection[str], *, what: str = "setting") -> str:
    """The message for ``name``, with the nearest known one.

    Not written ``NAME:``, which the log redaction of LiteLLM removes.
    """
    # The prefix that all share would make everything look near.
    bare = {k.removeprefix(ENV_PREFIX): k for k in known}
    nearest = [bare[b] for b in difflib.get_close_matches(name.removeprefix(ENV_PREFIX), bare, n=1, cutoff=0.5)]
    return f"the {what} {name} is not known" + (f"; did you mean {nearest[0]}?" if nearest else "")


class SettingsSource(PydanticBaseSettingsSource):
    """Values that were read before, with ``<name>_file`` replaced by what the file holds."""

    def __init__(self, settings_cls: type[BaseSettings], values: Mapping[str, Any]) -> None:
        super().__init__(settings_cls)
        self._values = _with_files(settings_cls, values)

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return self._values.get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        return dict(self._values)


def read_environment(settings_cls: type[BaseSettings]) -> dict[str, str]:
    """The ``HOMEPORT_*`` variables by field name; an empty one is unset, as container tools write them.

    Raises ``ValueError`` for a name that is not known.
    """
    fields = {env_name(f): f for f in settings_cls.model_fields}
    values = {}
    for given, value in os.environ.items():
        name = given.upper()
        if not name.startswith(ENV_PREFIX) or _is_service_link(name):
            continue
        if name not in fields:
            raise ValueError(unknown_name(name, fields))
        if value.strip():
            values[fields[name]] = value
    return values


def read_toml(settings_cls: type[BaseSettings], path: str | os.PathLike[str]) -> dict[str, Any]:
    """The settings in a TOML file, named as in the environment without prefix and in lower case.

    Raises ``ValueError`` for a file that cannot be read or holds a name that is not known.
    """
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"the file of the setting HOMEPORT_CONFIG_FILE cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ValueError("the file of the setting HOMEPORT_CONFIG_FILE is not UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        # Only the place: the rest of the text may quote a secret.
        where = re.search(r"at line \d+", str(error))
        place = f" ({where[0]})" if where else ""
        raise ValueError(f"the file of the setting HOMEPORT_CONFIG_FILE is not TOML{place}") from None
    known = settings_cls.model_fields.keys() - {"config_file"}
    for name in values:
        if name not in known:
            raise ValueError(f"{unknown_name(name, known)} (in the file of HOMEPORT_CONFIG_FILE)")
    return values


def _is_service_link(name: str) -> bool:
    # Kubernetes injects these for a service that is called homeport.
    return name == "HOMEPORT_PORT" or name.startswith(("HOMEPORT_PORT_", "HOMEPORT_SERVICE_"))


def _with_files(settings_cls: type[BaseSettings], values: Mapping[str, Any]) -> dict[str, Any]:
    read = dict(values)
    for name in values:
        target = name.removesuffix("_file")
        if target == name or target not in settings_cls.model_fields or values[name] is None:
            continue
        if target in values:
            raise ValueError(f"the settings {env_name(target)} and {env_name(name)} exclude each other")
        try:
            lines = Path(values[name]).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError, TypeError):
            raise ValueError(f"the file of the setting {env_name(name)} cannot be read") from None
        found = [line.strip() for line in lines if line.strip()]
        if not found:
            raise ValueError(f"the file of the setting {env_name(name)} is empty")
        many = get_origin(settings_cls.model_fields[target].annotation) is tuple
        if not many and len(found) > 1:
            raise ValueError(f"the file of the setting {env_name(name)} holds more than one line")
        read[target] = found if many else found[0]
    return read
