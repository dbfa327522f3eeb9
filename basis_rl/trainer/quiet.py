"""Warnings of other libraries that no user of this one can act on."""

from __future__ import annotations

import logging
import warnings

_OF_DEEPSPEED = ("Setting accelerator to CPU",)


class _Without(logging.Filter):
    """Drops records that begin with one of these texts."""

    def __init__(self, *texts: str) -> None:
        super().__init__()
        self.texts = texts

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(self.texts)


def quieten() -> None:
    """Drop two messages: DeepSpeed's, when it is installed and not used, and the deprecation of names that TRL uses."""
    logger = logging.getLogger("DeepSpeed")
    if not any(isinstance(each, _Without) for each in logger.filters):
        logger.addFilter(_Without(*_OF_DEEPSPEED))
    # TRL still says `gradient_checkpointing`, and transformers warns of it.
    warnings.filterwarnings("ignore", ".*gradient_checkpointing.* is deprecated", FutureWarning)
