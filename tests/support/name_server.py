"""A DNS server whose answers change at run time. ``dnspython`` reads the questions and writes the answers."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

import dns.exception
import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset


class NameServer:
    """Answers on ``listener``, a bound UDP socket. ``addresses``: IPv4, by name; other names do not exist.
    ``silent``: it answers nothing. ``questions``: how many have come for each name."""

    def __init__(self, listener: socket.socket) -> None:
        self.addresses: dict[str, list[str]] = {}
        self.silent = False
        self.questions: dict[str, int] = {}
        self._listener = listener
        threading.Thread(target=self._serve, name="name-server", daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):  # it is not connected; the waiting thread wakes all the same
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                question, client = self._listener.recvfrom(4096)
            except OSError:  # closed
                return
            try:
                answer = self._answer(dns.message.from_wire(question))
            except dns.exception.DNSException:
                continue
            if not self.silent:
                self._listener.sendto(answer.to_wire(), client)

    def _answer(self, question: dns.message.Message) -> dns.message.Message:
        answer = dns.message.make_response(question)
        answer.flags |= dns.flags.AA | dns.flags.RA
        (asked,) = question.question
        name = asked.name.to_text(omit_final_dot=True)
        found = self.addresses.get(name)
        if found is None:
            answer.set_rcode(dns.rcode.NXDOMAIN)
        elif asked.rdtype == dns.rdatatype.A and found:
            answer.answer.append(dns.rrset.from_text(asked.name, 0, asked.rdclass, asked.rdtype, *found))
        self.questions[name] = self.questions.get(name, 0) + 1
        return answer
