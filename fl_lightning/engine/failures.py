"""The clients that failed in a round."""

from __future__ import annotations

from typing import NoReturn

from fl_lightning.errors import ClientError, UsageError


class Failures:
    """The clients that failed in a round, on any worker.

    Attributes:
        messages: for each client, whether its error is a UsageError, and the text of the error.
    """

    def __init__(self) -> None:
        self.messages: dict[int, tuple[bool, str]] = {}
        self._errors: dict[int, Exception] = {}

    def __len__(self) -> int:
        return len(self.messages)

    def add(self, k: int, error: Exception) -> None:
        """Record that client ``k`` failed on this worker."""
        self.messages[k] = (isinstance(error, UsageError), str(error))
        self._errors[k] = error

    def take(self, messages: dict[int, tuple[bool, str]]) -> None:
        """Record the clients that failed on another worker."""
        self.messages = dict(sorted((self.messages | messages).items()))

    def texts(self) -> list[str]:
        """The texts of the errors, by ascending client."""
        return [text for _, text in self.messages.values()]

    def throw(self) -> NoReturn:
        """Raise the error of the first client; it keeps its cause only if the client failed on this worker."""
        k, (usage, text) = next(iter(self.messages.items()))
        raise self._errors.get(k) or (UsageError(text) if usage else ClientError(text))
