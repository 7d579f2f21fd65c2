"""The settings as they are in a LiteLLM proxy; nothing of LiteLLM is imported here."""

from __future__ import annotations

from homeport import Settings

__all__ = ["load_settings"]


def load_settings() -> Settings:
    """The settings of the environment; the tenant is LiteLLM's identity unless they say otherwise.

    Raises ``ValueError`` for settings that do not do here.
    """
    settings = Settings()
    if "tenant_mode" not in settings.model_fields_set:
        settings = Settings(tenant_mode="host")
    if "database_url" not in settings.model_fields_set:
        raise ValueError(
            "the setting HOMEPORT_DATABASE_URL is needed in LiteLLM: its replicas share one store, and a file in each "
            "container would be worse than none"
        )
    if settings.litellm_adopt and settings.tenant_mode != "host":
        raise ValueError("the setting HOMEPORT_LITELLM_ADOPT needs HOMEPORT_TENANT_MODE=host")
    for name in ("pin_header", "served_by_header"):
        if getattr(settings, name):
            raise ValueError(
                f"the setting HOMEPORT_{name.upper()} has no use in LiteLLM, which is pinned by its router"
            )
    return settings
