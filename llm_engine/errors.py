"""What can go wrong in the engine, and whose fault it is.

EngineError
├── ModelError           the operator's: this file cannot be loaded (names it, gives llama.cpp's reason)
├── DoesNotFit           the operator's: this machine has no memory for what the options ask for
├── ConfigError          the operator's: an option is out of its range (names field, value and range)
├── RequestError         the caller's: this request can never be honoured
│   ├── PromptTooLong    more tokens than a slot holds
│   └── TemplateRefused  the model's chat template will not render these messages
├── EngineBusy           nobody's: no place free now; try later or elsewhere
├── EngineClosed         the caller's: a call after `close()` or during `drain()`
├── BackendError         ours: llama.cpp failed a step it should not have
└── SessionFileError     nobody's: a file of kept KV is no good; its prompt is computed anew
"""


class EngineError(Exception):
    """Base of everything this package raises on purpose."""


class ModelError(EngineError):
    """The model file cannot be loaded."""

    def __init__(self, file: str, reason: str) -> None:
        super().__init__(file, reason)  # as it takes them, so that it can cross between processes
        self.file = file
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.file}: {self.reason}"


class DoesNotFit(EngineError):
    """The machine cannot hold the model with its KV; the text says what would take less."""


class ConfigError(EngineError, ValueError):
    """An option is out of its range."""


class RequestError(EngineError):
    """The request can never be honoured by this model."""


class PromptTooLong(RequestError):
    """The prompt alone leaves no room for one token in a slot's context.

    `n_prompt` is a lower bound for a prompt so long that it was not tokenised.
    """

    def __init__(self, n_prompt: int, n_ctx: int) -> None:
        super().__init__(f"the prompt has {n_prompt} tokens, the context holds {n_ctx}")
        self.n_prompt = n_prompt
        self.n_ctx = n_ctx


class TemplateRefused(RequestError):
    """The model's chat template will not render these messages; the text is its own reason."""


class EngineBusy(EngineError):
    """The waiting list is full."""


class EngineClosed(EngineError):
    """The engine is draining or closed."""


class BackendError(EngineError):
    """llama.cpp failed a step."""


class SessionFileError(EngineError):
    """A file of kept KV is half, flipped, or no such file."""
