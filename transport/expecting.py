"""What D's ends of channels have in common, whatever carries the messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvferry.transport.plane import Pieces, Received, RecvChannel


@dataclass(slots=True)
class Expected:
    """A message that was announced to D; ``into`` says where its bytes belong, None for a slot."""

    nbytes: int
    into: Callable[[], Pieces] | None


class ExpectingChannel(RecvChannel):
    """D's end, which knows by their tags the messages that are to come. ``arrived``: those that ``poll`` gives out."""

    def __init__(self) -> None:
        self.expected: dict[int, Expected] = {}
        self.arrived: list[Received] = []

    def expect(self, tag: int, nbytes: int, into: Callable[[], Pieces] | None = None) -> None:
        self.expected[tag] = Expected(nbytes, into)

    def poll(self) -> list[Received]:
        arrived, self.arrived = self.arrived, []
        return arrived

    def posted(self) -> set[int]:
        return set()  # whatever has not begun to arrive may be forgotten

    def forget(self, tag: int) -> None:
        self.expected.pop(tag, None)

    def release_arrived(self) -> None:
        """The channel closes: nobody will see these any more."""
        for message in self.poll():
            message.release()
