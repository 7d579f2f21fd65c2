"""homeport in a LiteLLM proxy, installed by its environment alone (README.md in this folder).

``LITELLM_WORKER_STARTUP_HOOKS=homeport_litellm:install`` mounts it in every worker of the stock ``litellm`` command.
"""

__all__ = ["install"]


async def install() -> None:
    """Mount homeport in the LiteLLM proxy of this process; twice is a no-op.

    Raises ``RuntimeError`` for a LiteLLM that this version was not made for and ``ValueError`` for settings that do not
    do: LiteLLM then does not start.
    """
    try:
        from homeport_litellm.mount import install as mount  # imports LiteLLM, which nobody else needs
    except ImportError as error:
        raise RuntimeError(f"homeport cannot work with this LiteLLM: {error}") from None
    await mount()
