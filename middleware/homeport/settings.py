"""The settings: each one's name, default, bounds and documentation, in one place (DESIGN.md sections 3 to 13)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from homeport import settings_checks as checks
from homeport.settings_checks import UpstreamSettings, normalise_base_url
from homeport.settings_sources import ENV_PREFIX, SettingsSource, env_name, read_environment, read_toml, unknown_name
from homeport.units import duration_text, parse_duration, parse_list, parse_size, size_text

__all__ = ["Settings", "UpstreamSettings", "normalise_base_url", "settings_reference"]

_DAY: Final = 86400.0
_MIB: Final = 1 << 20

type_seconds = BeforeValidator(parse_duration)
