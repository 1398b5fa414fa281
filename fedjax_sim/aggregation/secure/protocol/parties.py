"""The two parties of secure aggregation as it is deployed: a client with its secrets, and the server.

A client that is told whom it deals with (`Known`) trusts no word of the server: keys are signed, and no share is opened
before enough holders signed that the server told them the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from fedjax_sim.aggregation.secure.protocol import primitives as crypto
from fedjax_sim.aggregation.secure.ring import Ring

__all__ = ["Advertised", "Asked", "Client", "Inconsistent", "Known", "Opened", "Refused", "Server", "Signed"]


class Refused(RuntimeError):
    """A client does not answer a request that would open what only it may know."""


class Inconsistent(Refused):
    """A client does not open shares: too few of those who hold them signed what the server told this one."""


class Known(NamedTuple):
    """What all clients know beforehand, and not from the server: without it they trust the server's word."""

    around: Mapping[int, list[int]]  # each slot's neighbours
    identities: Mapping[int, bytes]  # each slot's 32 bytes to check its signatures by; they last for one round


class Advertised(NamedTuple):
    """A client's public keys."""

    sealing: bytes  # 32 bytes, to agree on keys that seal shares
    masking: bytes  # 32 bytes, to agree on seeds of masks
    signature: bytes = b""  # of both, 64 bytes; empty where the server's word is trusted


class Asked(NamedTuple):
    """What the server asks a client for, of those whose shares it holds."""

    uploaded: frozenset[int]  # shares of their own masks' seeds
    left: frozenset[int]  # shares of their masking keys

    def written(self, slot: int) -> bytes:
        """What a client in this slot signs, if it is asked for these."""
        return repr((slot, sorted(self.uploaded), sorted(self.left))).encode()


class Signed(NamedTuple):
    """A client's word on what the server asked it for."""

    asked: Asked
    signature: bytes


class Opened(NamedTuple):
    """The shares that a client answers with, by whose they are."""

    seeds: dict[int, int]
    keys: dict[int, int]


class Client:
    """One client: what it knows, and its answers in the four steps.

    Args:
      slot: its place in the cohort.
      ring: of the messages.
      threshold: the shares that open a secret.
      keeps_share: whether it holds a share of its own secrets, as on the complete graph.
      seed: 32 bytes that all its secrets follow from.
      known: what it knows of the others; None: it trusts the server, which is honest but curious.
    """

    def __init__(
        self, slot: int, ring: Ring, threshold: int, keeps_share: bool, seed: bytes, known: Known | None = None
    ) -> None:
        self.known, self._signing = known, None
        if known is not None:
            self._signing = crypto.signing_key(crypto.random_bytes(seed, "signing", crypto.KEY_BYTES))
        self.slot, self.ring, self.threshold, self.keeps_share, self.seed = slot, ring, threshold, keeps_share, seed
        self._masking_secret = crypto.random_bytes(seed, "masking", crypto.KEY_BYTES)
        self._own_seed = crypto.random_bytes(seed, "own", crypto.KEY_BYTES)
        self._sealing = crypto.private_key(crypto.random_bytes(seed, "sealing", crypto.KEY_BYTES))
        self._masking = crypto.private_key(self._masking_secret)
        self._keys: dict[int, Advertised] = {}
        self._received: dict[int, bytes] = {}
        self._own_shares = 0, 0
        self._asked: Asked | None = None

    @property
    def identity(self) -> bytes:
        """32 bytes by which the others check its signatures."""
        return crypto.public_key(self._signing)

    def advertise(self) -> Advertised:
        """Step 1: its public keys, signed where the server is not trusted."""
        keys = crypto.public_key(self._sealing), crypto.public_key(self._masking)
        return Advertised(*keys, b"" if self.known is None else crypto.sign(self._signing, "keys", b"".join(keys)))

    def share(self, keys: Mapping[int, Advertised]) -> dict[int, bytes]:
        """Step 2: for each neighbour that advertised keys, sealed shares of both secrets.

        Raises: Refused for keys that their owner did not sign, which could be the server's own.
        """
        for other, found in keys.items():
            if self.known is not None and not self._says(other, "keys", found.sealing + found.masking, found.signature):
                raise Refused(f"client {self.slot} takes no keys of client {other} that it did not sign")
        self._keys = dict(keys)
        holders = [*keys, self.slot] if self.keeps_share else list(keys)
        of_seed, of_key = (
            crypto.secret_shares(
                crypto.random_bytes(self.seed, f"shares of {name}", 32), secret, self.threshold, holders
            )
            for name, secret in (("own", self._own_seed), ("masking", self._masking_secret))
        )
        self._own_shares = of_seed.get(self.slot, 0), of_key.get(self.slot, 0)
        sealed = {}
        for other in keys:
            pair = b"".join(x[other].to_bytes(crypto.SHARE_BYTES, "little") for x in (of_seed, of_key))
            sealed[other] = crypto.seal(self._seal_key(self.slot, other), pair)
        return sealed

    def upload(self, sealed: Mapping[int, bytes], message: np.ndarray) -> bytes:
        """Step 3: its message [d] under its own mask and one for each neighbour that shared secrets, packed.

        Raises: Refused where it does not trust the server, and fewer than the threshold are said to share with it.
        """
        if self.known is not None and len(sealed) + self.keeps_share < self.threshold:
            raise Refused(f"client {self.slot} does not upload among {len(sealed)} others: too few hold its shares")
        self._received = dict(sealed)
        size = len(message)
        total = crypto.reduced(self.ring, message)
        total = crypto.signed_sum(self.ring, total, crypto.mask(self.ring, self._own_seed, size))
        for other in sealed:
            seed = crypto.agreed_secret(self._masking, self._keys[other].masking, "mask")
            sign = 1 if other > self.slot else -1
            total = crypto.signed_sum(self.ring, total, crypto.mask(self.ring, seed, size), sign)
        return crypto.packed(self.ring, total)

    def sign(self, asked: Asked) -> bytes:
        """Between steps 3 and 4, where the server is not trusted: its word on what it is asked for.

        Raises: Refused as `answer`, and for fewer uploads than the threshold: their sum would say too much.
        """
        self._agree(asked)
        if len(asked.uploaded) < self.threshold:
            raise Refused(f"client {self.slot} opens no sum of {len(asked.uploaded)} messages around it")
        return crypto.sign(self._signing, "asked", asked.written(self.slot))

    def answer(self, asked: Asked, signed: Mapping[int, Signed] | None = None) -> Opened:
        """Step 4: the shares that the server asks for.

        Args:
          signed: the others' words, by slot; read where the server is not trusted.

        Raises: Refused where the server asks for both secrets of a client, for this client's own key, for shares that
          it does not hold, or a second time for others than before. Inconsistent where it does not trust the server,
          and of the holders of a share fewer than the threshold, itself included, signed that they are asked for the
          same one.

        Guarantees: tests/aggregation/secure/protocol/test_protocol.py::test_never_both_secrets. Of h holders of a
          secret let c collude with the server. It gets both secrets by lies if and only if 2 t <= h + c
          (tests/aggregation/secure/protocol/test_active_server.py::test_lies_about_one_client). Above, on the complete
          graph, all who answer a server that they do not trust were told the same, so a sum holds t messages; where
          they trust it, some lies leave fewer (::test_lies_about_many_clients, ::test_lies_leave_a_sum_of_few).
        """
        self._agree(asked)
        if self.known is not None:
            agreeing = self._agreeing(asked, signed or {})
            for other in asked.uploaded | asked.left:
                if (number := agreeing[other]) < self.threshold:
                    words = f"{number} of its holders signed what this one was told, {self.threshold} are needed"
                    raise Inconsistent(f"client {self.slot} opens no share of client {other}: {words}")
        return Opened(
            {other: self._held(other)[0] for other in asked.uploaded},
            {other: self._held(other)[1] for other in asked.left},
        )

    def _agreeing(self, asked: Asked, signed: Mapping[int, Signed]) -> dict[int, int]:
        """For each client asked about, the holders of its shares who were asked for the same one, itself included."""
        number = dict.fromkeys(asked.uploaded | asked.left, 1)
        for signer, word in signed.items():
            if signer == self.slot or not self._says(signer, "asked", word.asked.written(signer), word.signature):
                continue
            holds = {*self.known.around[signer], *([signer] if self.keeps_share else [])}
            for other in holds & ((asked.uploaded & word.asked.uploaded) | (asked.left & word.asked.left)):
                number[other] += 1
        return number

    def _says(self, other: int, label: str, data: bytes, signature: bytes) -> bool:
        return crypto.is_signed(self.known.identities[other], label, data, signature)

    def _agree(self, asked: Asked) -> None:
        """Refuses what would open too much, and from now on any other request."""
        if both := asked.uploaded & asked.left:
            raise Refused(f"client {self.slot} does not open both secrets of {sorted(both)}")
        if self.slot in asked.left:
            raise Refused(f"client {self.slot} uploaded its message: its masking key stays closed")
        mine = {self.slot} if self.keeps_share else set()
        if strangers := (asked.uploaded | asked.left) - set(self._received) - mine:
            raise Refused(f"client {self.slot} holds no shares of {sorted(strangers)}")
        if self._asked is not None and asked != self._asked:
            raise Refused(f"client {self.slot} has answered another request before")
        self._asked = asked

    def _seal_key(self, sender: int, holder: int) -> bytes:
        """The key of the one message that a sender seals for a holder, one of whom it is."""
        other = sender + holder - self.slot
        return crypto.agreed_secret(self._sealing, self._keys[other].sealing, f"seal {sender} {holder}")

    def _held(self, other: int) -> tuple[int, int]:
        """The shares of another client's seed and key; of its own, if it keeps them."""
        if other == self.slot:
            return self._own_shares
        pair, size = crypto.unseal(self._seal_key(other, self.slot), self._received[other]), crypto.SHARE_BYTES
        return int.from_bytes(pair[:size], "little"), int.from_bytes(pair[size:], "little")


class Server:
    """What the server learns from one step to the next.

    Args:
      around: each slot's neighbours.
      keeps_share: whether clients hold shares of their own secrets.
    """

    def __init__(self, ring: Ring, threshold: int, around: Mapping[int, list[int]], keeps_share: bool) -> None:
        self.ring, self.threshold, self.around, self.keeps_share = ring, threshold, around, keeps_share
        self.keys: dict[int, Advertised] = {}
        self.sealed: dict[int, dict[int, bytes]] = {}  # by sender, then holder
        self.masked: dict[int, np.ndarray] = {}
        self.signed: dict[int, Signed] = {}

    def keys_for(self, slot: int) -> dict[int, Advertised]:
        """After step 1: the keys of its neighbours."""
        return {other: self.keys[other] for other in self.around[slot] if other in self.keys}

    def seals_for(self, slot: int) -> dict[int, bytes]:
        """After step 2: what its neighbours sealed for it."""
        return {other: self.sealed[other][slot] for other in self.around[slot] if other in self.sealed}

    def ask(self, slot: int) -> Asked:
        """After step 3: whose shares it asks a client for."""
        held = {other for other in self.around[slot] if other in self.sealed} | ({slot} if self.keeps_share else set())
        return Asked(frozenset(held & set(self.masked)), frozenset(held - set(self.masked)))

    def signed_for(self, slot: int) -> dict[int, Signed]:
        """After the clients gave their words: those of others who hold a share that this one holds."""
        held = self._holds(slot)
        return {other: word for other, word in self.signed.items() if other != slot and held & self._holds(other)}

    def _holds(self, slot: int) -> set[int]:
        return {*self.around[slot], *([slot] if self.keeps_share else [])}

    def total(self, answers: Mapping[int, Opened]) -> np.ndarray | None:
        """After step 4: the sum of the messages [d], as elements; None if a secret that it needs stays closed."""
        seeds: dict[int, dict[int, int]] = {slot: {} for slot in self.masked}
        wanted = {slot for slot in self.sealed if any(other in self.masked for other in self.around[slot])}
        keys: dict[int, dict[int, int]] = {slot: {} for slot in wanted - set(self.masked)}
        for holder, found in answers.items():
            for kind, shares in ((seeds, found.seeds), (keys, found.keys)):
                for slot, share in shares.items():
                    kind[slot][holder] = share
        if any(len(held) < self.threshold for held in (*seeds.values(), *keys.values())):
            return None
        masks = [(crypto.opened_secret(held, self.threshold), -1) for held in seeds.values()]
        for slot, held in keys.items():
            key = crypto.private_key(crypto.opened_secret(held, self.threshold))
            for other in self.around[slot]:
                if other in self.masked:  # against the survivor's own sign
                    seed = crypto.agreed_secret(key, self.keys[other].masking, "mask")
                    masks.append((seed, -1 if slot > other else 1))
        total, *others = self.masked.values()
        for x in others:
            total = crypto.signed_sum(self.ring, total, x)
        for seed, sign in masks:
            total = crypto.signed_sum(self.ring, total, crypto.mask(self.ring, seed, len(total)), sign)
        return total
