"""A batched llama.cpp engine: `Engine.spawn(EngineConfig())`, `engine.submit(GenerateRequest.user("Hi."))`.

The names below are loaded on first use, so that importing one module does not load llama.cpp. Nothing at all
is loaded here: the commands begin with this module, and Ctrl-C is not yet dealt with.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_HOMES = {
    "Engine": "engine",
    "EngineConfig": "config",
    "GenerateRequest": "generation",
    "Generation": "generation",
    "Delta": "generation",
    "Finished": "generation",
    "Failed": "generation",
    "SamplingParams": "sampling",
}

__all__ = [
    "Delta",
    "Engine",
    "EngineConfig",
    "Failed",
    "Finished",
    "GenerateRequest",
    "Generation",
    "SamplingParams",
]


def __getattr__(name: str) -> "Any":
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
