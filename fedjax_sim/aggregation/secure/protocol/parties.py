"""The two kinds of parties of secure aggregation: a client with its secrets, and the server.

A client that knows the others' identities (`Known`) does not trust the server. It accepts only signed keys, and opens a
share only after enough holders have signed that the server told them the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from fedjax_sim.aggregation.secure.protocol import primitives as crypto
from fedjax_sim.aggregation.secure.ring import Ring


class Refused(RuntimeError):
    """A client refuses a request that would reveal what only the client may know."""


class Inconsistent(Refused):
    """A client refuses to open shares, since too few of their holders signed what the server told this client."""


class Known(NamedTuple):
    """A `Known` holds what all clients know beforehand, and not from the server. Without it they trust the server."""

    around: Mapping[int, list[int]]  # the neighbours of each slot
    identities: Mapping[int, bytes]  # the 32 bytes that verify each slot's signatures; valid for one round


class Advertised(NamedTuple):
    """An `Advertised` holds a client's public keys."""

    sealing: bytes  # 32 bytes, to agree on keys that encrypt shares
    masking: bytes  # 32 bytes, to agree on seeds of masks
    signature: bytes = b""  # of both keys, 64 bytes; empty if clients trust the server


class Asked(NamedTuple):
    """The shares that the server asks a client for, by the slots whose secrets they open."""

    uploaded: frozenset[int]  # slots that uploaded: shares of the seeds of their own masks
    left: frozenset[int]  # slots that left: shares of their masking keys

    def written(self, slot: int) -> bytes:
        """Encodes the request as the bytes that a client in this slot signs."""
        return repr((slot, sorted(self.uploaded), sorted(self.left))).encode()


class Signed(NamedTuple):
    """A `Signed` is a client's signed statement of what the server asked it for."""

    asked: Asked
    signature: bytes


class Opened(NamedTuple):
    """The shares that a client answers with, by the slots whose secrets they open."""

    seeds: dict[int, int]  # shares of the seeds of own masks
    keys: dict[int, int]  # shares of masking keys


class Client:
    """A `Client` holds its secrets, and gives the answers in the four steps of the protocol.

    Args:
      slot: the client's place in the cohort.
      ring: the ring of the messages.
      threshold: the shares that open a secret.
      keeps_share: whether the client holds a share of its own secrets, as on the complete graph.
      seed: 32 bytes; all the client's secrets follow from them.
      known: what the client knows of the others. None: it trusts the server, which is honest but curious.
    """

    def __init__(
        self, slot: int, ring: Ring, threshold: int, *, keeps_share: bool, seed: bytes, known: Known | None = None
    ) -> None:
        self.known = known
        self._signing = None
        if known is not None:
            self._signing = crypto.signing_key(crypto.random_bytes(seed, "signing", crypto.KEY_BYTES))
        self.slot = slot
        self.ring = ring
        self.threshold = threshold
        self.keeps_share = keeps_share
        self.seed = seed
        self._masking_secret = crypto.random_bytes(seed, "masking", crypto.KEY_BYTES)
        self._own_seed = crypto.random_bytes(seed, "own", crypto.KEY_BYTES)
        self._sealing = crypto.private_key(crypto.random_bytes(seed, "sealing", crypto.KEY_BYTES))
        self._masking = crypto.private_key(self._masking_secret)
        self._keys: dict[int, Advertised] = {}
        self._received: dict[int, bytes] = {}  # encrypted shares, by sender
        self._own_shares = 0, 0  # of its own mask's seed and of its masking key
        self._asked: Asked | None = None  # the first request, which binds the server

    @property
    def identity(self) -> bytes:
        """The 32 bytes that verify the client's signatures."""
        return crypto.public_key(self._signing)

    def advertise(self) -> Advertised:
        """Returns the public keys (step 1), signed if the client does not trust the server."""
        keys = crypto.public_key(self._sealing), crypto.public_key(self._masking)
        signature = b"" if self.known is None else crypto.sign(self._signing, "keys", b"".join(keys))
        return Advertised(*keys, signature)

    def share(self, keys: Mapping[int, Advertised]) -> dict[int, bytes]:
        """Returns encrypted shares of both secrets for each neighbour that advertised keys (step 2).

        Args:
          keys: the public keys of the neighbours, by slot.

        Raises: Refused, if the client does not trust the server, for keys that are not signed by their owner. They
          could be the server's own keys.
        """
        for other, advertised in keys.items():
            signed_bytes = advertised.sealing + advertised.masking
            if self.known is not None and not self._has_signed(other, "keys", signed_bytes, advertised.signature):
                raise Refused(f"client {self.slot} takes no keys of client {other} that it did not sign")
        self._keys = dict(keys)
        holders = [*keys, self.slot] if self.keeps_share else list(keys)
        seed_shares, key_shares = (
            crypto.secret_shares(
                crypto.random_bytes(self.seed, f"shares of {name}", 32), secret, self.threshold, holders
            )
            for name, secret in (("own", self._own_seed), ("masking", self._masking_secret))
        )
        self._own_shares = seed_shares.get(self.slot, 0), key_shares.get(self.slot, 0)
        sealed = {}
        for other in keys:
            # Both shares are encrypted together, as bytes of a fixed width.
            pair = b"".join(x[other].to_bytes(crypto.SHARE_BYTES, "little") for x in (seed_shares, key_shares))
            sealed[other] = crypto.seal(self._seal_key(self.slot, other), pair)
        return sealed

    def upload(self, sealed: Mapping[int, bytes], message: np.ndarray) -> bytes:
        """Returns the masked message, packed to bytes (step 3).

        The message gets the client's own mask, and a mask for each neighbour that shared secrets.

        Args:
          sealed: what the neighbours encrypted for this client, by sender.
          message: [d] integers.

        Raises: Refused if the client does not trust the server, and fewer than the threshold are said to share with it.
        """
        if self.known is not None and len(sealed) + self.keeps_share < self.threshold:
            raise Refused(f"client {self.slot} does not upload among {len(sealed)} others: too few hold its shares")
        self._received = dict(sealed)
        dimension = len(message)
        masked = crypto.reduced(self.ring, message)
        masked = crypto.signed_sum(self.ring, masked, crypto.mask(self.ring, self._own_seed, dimension))
        for other in sealed:
            seed = crypto.agreed_secret(self._masking, self._keys[other].masking, "mask")
            sign = 1 if other > self.slot else -1  # of a pair the lower slot adds the mask, and the higher subtracts it
            masked = crypto.signed_sum(self.ring, masked, crypto.mask(self.ring, seed, dimension), sign)
        return crypto.packed_elements(self.ring, masked)

    def sign(self, asked: Asked) -> bytes:
        """Between steps 3 and 4, if the server is not trusted: signs what the server asks this client for.

        Raises: Refused as `answer` does, and for fewer uploads than the threshold: their sum would reveal too much.
        """
        self._accept(asked)
        if len(asked.uploaded) < self.threshold:
            raise Refused(f"client {self.slot} opens no sum of {len(asked.uploaded)} messages around it")
        return crypto.sign(self._signing, "asked", asked.written(self.slot))

    def answer(self, asked: Asked, signed: Mapping[int, Signed] | None = None) -> Opened:
        """Returns the shares that the server asks for (step 4).

        Args:
          asked: the request.
          signed: the other clients' statements, by slot; read only if the server is not trusted. None: no statements.

        Raises:
          Refused: if the server asks for both secrets of a client, for this client's own key, for shares that it does
            not hold, or a second time for other shares than before.
          Inconsistent: if the client does not trust the server, and fewer than `threshold` holders of a secret, this
            client included, signed that they are asked for the same secret.

        Guarantees:
          - a client never opens shares of both secrets of a client
            (tests/aggregation/secure/protocol/test_protocol.py::test_never_both_secrets)
          - of h holders of a secret let c collude with the server: it gets both secrets by lies if and only if
            2 t <= h + c (tests/aggregation/secure/protocol/test_active_server.py::test_lies_about_one_client)
          - for larger t, on the complete graph, all clients that answer a server that they do not trust were told the
            same, so a sum holds t messages; if they trust the server, some lies leave fewer messages
            (::test_lies_about_many_clients, ::test_lies_leave_a_sum_of_few)
        """
        self._accept(asked)
        if self.known is not None:
            num_agreeing = self._num_agreeing(asked, signed or {})
            for other in asked.uploaded | asked.left:
                if (number := num_agreeing[other]) < self.threshold:
                    words = f"{number} of its holders signed what this one was told, {self.threshold} are needed"
                    raise Inconsistent(f"client {self.slot} opens no share of client {other}: {words}")
        return Opened(
            {other: self._opened_shares(other)[0] for other in asked.uploaded},
            {other: self._opened_shares(other)[1] for other in asked.left},
        )

    def _num_agreeing(self, asked: Asked, signed: Mapping[int, Signed]) -> dict[int, int]:
        """Counts, for each client asked about, the holders of its shares that were asked for the same secret.

        This client counts as one of the holders.

        Args:
          asked: what this client is asked for.
          signed: the other clients' statements, by slot. A statement with a wrong signature does not count, and neither
            does a signer for secrets of which it holds no share.

        Returns: the number of holders, at least 1, by the slot whose secret is asked for.
        """
        number = dict.fromkeys(asked.uploaded | asked.left, 1)
        for signer, statement in signed.items():
            written = statement.asked.written(signer)
            if signer == self.slot or not self._has_signed(signer, "asked", written, statement.signature):
                continue
            # The graph is known beforehand, so a signer counts only for the clients whose shares it really holds.
            holds = {*self._others.around[signer], *([signer] if self.keeps_share else [])}
            agrees_on = (asked.uploaded & statement.asked.uploaded) | (asked.left & statement.asked.left)
            for other in holds & agrees_on:
                number[other] += 1
        return number

    def _has_signed(self, other: int, label: str, data: bytes, signature: bytes) -> bool:
        """Whether a signature of these bytes is that of another client."""
        return crypto.is_signed(self._others.identities[other], label, data, signature)

    @property
    def _others(self) -> Known:
        """What a client that asks for signatures knows of the others."""
        assert self.known is not None, "only such clients ask for signatures"
        return self.known

    def _accept(self, asked: Asked) -> None:
        """Refuses a request that would open too much; after an accepted request, refuses any other request."""
        if both := asked.uploaded & asked.left:
            raise Refused(f"client {self.slot} does not open both secrets of {sorted(both)}")
        if self.slot in asked.left:
            raise Refused(f"client {self.slot} uploaded its message: its masking key stays closed")
        own_slot = {self.slot} if self.keeps_share else set()
        if strangers := (asked.uploaded | asked.left) - set(self._received) - own_slot:
            raise Refused(f"client {self.slot} holds no shares of {sorted(strangers)}")
        if self._asked is not None and asked != self._asked:
            raise Refused(f"client {self.slot} has answered another request before")
        self._asked = asked

    def _seal_key(self, sender: int, holder: int) -> bytes:
        """The key of the single message that a sender encrypts for a holder; this client is one of the two."""
        other = sender + holder - self.slot  # of the two slots, the one that is not this client's
        return crypto.agreed_secret(self._sealing, self._keys[other].sealing, f"seal {sender} {holder}")

    def _opened_shares(self, other: int) -> tuple[int, int]:
        """The shares of a client's seed and key that this client holds."""
        if other == self.slot:
            return self._own_shares
        pair = crypto.unseal(self._seal_key(other, self.slot), self._received[other])
        size = crypto.SHARE_BYTES
        return int.from_bytes(pair[:size], "little"), int.from_bytes(pair[size:], "little")


class Server:
    """A `Server` holds what it has received so far, and makes what it sends in each step, and the sum.

    Args:
      ring: the ring of the messages.
      threshold: the shares that open a secret.
      around: the neighbours of each slot.
      keeps_share: whether clients hold shares of their own secrets.
    """

    def __init__(self, ring: Ring, threshold: int, around: Mapping[int, list[int]], keeps_share: bool) -> None:
        self.ring = ring
        self.threshold = threshold
        self.around = around
        self.keeps_share = keeps_share
        self.keys: dict[int, Advertised] = {}
        self.sealed: dict[int, dict[int, bytes]] = {}  # encrypted shares, by sender, then by holder
        self.masked: dict[int, np.ndarray] = {}
        self.signed: dict[int, Signed] = {}

    def keys_for(self, slot: int) -> dict[int, Advertised]:
        """After step 1: returns the public keys of a slot's neighbours."""
        return {other: self.keys[other] for other in self.around[slot] if other in self.keys}

    def seals_for(self, slot: int) -> dict[int, bytes]:
        """After step 2: returns the shares that a slot's neighbours encrypted for it."""
        return {other: self.sealed[other][slot] for other in self.around[slot] if other in self.sealed}

    def ask(self, slot: int) -> Asked:
        """After step 3: returns the request to a client: of each slot whose shares it holds, a share of one secret."""
        held = {other for other in self.around[slot] if other in self.sealed} | ({slot} if self.keeps_share else set())
        return Asked(frozenset(held & set(self.masked)), frozenset(held - set(self.masked)))

    def signed_for(self, slot: int) -> dict[int, Signed]:
        """After the clients signed: returns the statements of others who hold shares of the same secrets as a slot."""
        held = self._holds(slot)
        return {
            other: statement for other, statement in self.signed.items() if other != slot and held & self._holds(other)
        }

    def _holds(self, slot: int) -> set[int]:
        """The slots whose shares a slot holds."""
        return {*self.around[slot], *([slot] if self.keeps_share else [])}

    def total(self, answers: Mapping[int, Opened]) -> np.ndarray | None:
        """After step 4: computes the sum of the messages.

        Args:
          answers: the opened shares, by holder.

        Returns: [d] elements; None if a secret that the server needs stays closed.
        """
        # Shares by slot, then by holder: of the seeds of clients that uploaded, and of the keys of clients that left
        # and share a mask with a client that uploaded.
        seed_shares: dict[int, dict[int, int]] = {slot: {} for slot in self.masked}
        has_uploading_neighbour = {
            slot for slot in self.sealed if any(other in self.masked for other in self.around[slot])
        }
        key_shares: dict[int, dict[int, int]] = {slot: {} for slot in has_uploading_neighbour - set(self.masked)}
        for holder, answer in answers.items():
            for shares_by_slot, shares in ((seed_shares, answer.seeds), (key_shares, answer.keys)):
                for slot, share in shares.items():
                    shares_by_slot[slot][holder] = share
        if any(len(held) < self.threshold for held in (*seed_shares.values(), *key_shares.values())):
            return None
        # The masks in the sum, as (seed, the sign with which the mask is added to remove it).
        masks = [(crypto.opened_secret(held, self.threshold), -1) for held in seed_shares.values()]
        for slot, held in key_shares.items():
            key = crypto.private_key(crypto.opened_secret(held, self.threshold))
            for other in self.around[slot]:
                if other in self.masked:
                    seed = crypto.agreed_secret(key, self.keys[other].masking, "mask")
                    masks.append((seed, -1 if slot > other else 1))  # the opposite of the survivor's own sign
        total, *other_messages = self.masked.values()
        for message in other_messages:
            total = crypto.signed_sum(self.ring, total, message)
        for seed, sign in masks:
            total = crypto.signed_sum(self.ring, total, crypto.mask(self.ring, seed, len(total)), sign)
        return total
