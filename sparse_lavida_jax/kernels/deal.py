# SPDX-License-Identifier: Apache-2.0
"""Tokens dealt out to the devices that share a sequence: all get early ones and late ones.

Nothing but reshapes. Tokens move where a forward pass deals them out and where it takes them back;
to join streams and to part them moves none.
"""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Shaped

from sparse_lavida_jax.visibility import AnyArray


@dataclasses.dataclass(frozen=True)
class Deal:
    """How the tokens of a stream are dealt out to the devices of `sequence`: in turn, by stripes.

    On each device they keep their order. What is left of whole stripes is dealt out in shorter
    ones. 14 tokens over 2 devices in stripes of 3:

        0 1 2 3 4 5 6 7 8 9 10 11 12 13  ->  0 1 2 6 7 8 12 | 3 4 5 9 10 11 13

    Attributes:
        devices: as many; 1 where the tokens stay as they are.
        length: of the stream, a multiple of `devices`.
        stripe: tokens; a tile of queries, so that no tile holds tokens from far apart.
    """

    devices: int
    length: int
    stripe: int

    def out(self, x: Shaped[AnyArray, "b s *e"]) -> Array:
        """Deals the tokens out: those of the first device come first."""
        if self.devices == 1:
            return jnp.asarray(x)
        b, _, *e = x.shape
        dealt, start = [], 0
        for own, stripe in self._stripes:
            part = jnp.asarray(x[:, start : start + self.devices * own])
            part = part.reshape(b, -1, self.devices, stripe, *e)
            dealt.append(part.swapaxes(1, 2).reshape(b, self.devices, own, *e))
            start += self.devices * own
        return jnp.concatenate(dealt, axis=2).reshape(x.shape)

    def back(self, x: Shaped[AnyArray, "b s *e"]) -> Array:
        """Undoes `out`."""
        if self.devices == 1:
            return jnp.asarray(x)
        b, _, *e = x.shape
        x, taken, start = jnp.asarray(x).reshape(b, self.devices, -1, *e), [], 0
        for own, stripe in self._stripes:
            part = x[:, :, start : start + own].reshape(b, self.devices, -1, stripe, *e)
            taken.append(part.swapaxes(1, 2).reshape(b, -1, *e))
            start += own
        return jnp.concatenate(taken, axis=1)

    @property
    def _stripes(self) -> list[tuple[int, int]]:
        """Pairs: tokens of a device, and of each of their stripes."""
        own = self.length // self.devices
        rest = own % self.stripe
        pairs = [(own - rest, self.stripe), (rest, rest)]
        return [pair for pair in pairs if pair[0]]


def joined(streams: Sequence[Shaped[AnyArray, "b _s *e"]], deals: Sequence[Deal]) -> Array:
    """Concatenates streams [b _s *e] along their tokens: on every device its own, moving none."""
    devices = deals[0].devices
    if devices == 1:
        return jnp.concatenate(streams, axis=1)
    b, _, *e = streams[0].shape
    own = [x.reshape(b, devices, -1, *e) for x in streams]
    return jnp.concatenate(own, axis=2).reshape(b, -1, *e)


def parted(x: Shaped[AnyArray, "b s *e"], deals: Sequence[Deal]) -> list[Array]:
    """Undoes `joined`."""
    b, _, *e = x.shape
    x, parts, start = jnp.asarray(x).reshape(b, deals[0].devices, -1, *e), [], 0
    for deal in deals:
        stop = start + deal.length // deal.devices
        parts.append(x[:, :, start:stop].reshape(b, deal.length, *e))
        start = stop
    return parts


def in_order(x: Shaped[AnyArray, "b t *e"], deals: Sequence[Deal]) -> Array:
    """Puts the tokens of joined streams in the order that they had before."""
    if not deals or deals[0].devices == 1:
        return jnp.asarray(x)
    parts = parted(x, deals)
    return jnp.concatenate([d.back(part) for d, part in zip(deals, parts, strict=True)], axis=1)
