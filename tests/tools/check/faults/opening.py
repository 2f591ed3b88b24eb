"""Wrong servers: faults of Open, of its options and keys."""

import asyncio
import copy
from typing import Any

from starpod.v1 import environment_pb2 as pb
from tests.tools.check.faults.faulty import Faulty
from tests.tools.check.refused import Refused
from tests.tools.check.walk import SCHEMA

PROPERTIES: dict[str, Any] = SCHEMA["properties"]  # type: ignore[assignment]


class CutsSeeds(Faulty, reported="C-08", perhaps="C-09"):
    """Seeds are kept in 32 bits."""

    async def open_anew(self, request: pb.OpenRequest) -> pb.OpenResponse:
        if request.HasField("seed"):
            request.seed &= 0xFFFFFFFF
        return await super().open_anew(request)


class GroupsShareLuck(Faulty, reported="C-11"):
    """Every member of a group gets the same dynamics seed."""

    def derive(self, seed: int, member: int) -> int:
        return super().derive(seed, 0)


class CountsSessions(Faulty, reported="C-79", perhaps="C-63 S-17"):
    """The initial state depends on how many sessions there were before: not deterministic."""

    opened = 0

    def begin(self, options: dict[str, Any], seed: int, dynamics_seed: int) -> Any:
        walk = super().begin(options, seed, dynamics_seed)
        self.opened += 1
        walk.position = self.opened % (walk.length - 1)
        return walk


class SaltsByProcess(Faulty, reported="C-80"):
    """The initial state depends on the process, as with a salted hash."""

    processes = 0

    def __init__(self) -> None:
        super().__init__()
        self.salt = SaltsByProcess.processes = SaltsByProcess.processes + 1

    def begin(self, options: dict[str, Any], seed: int, dynamics_seed: int) -> Any:
        walk = super().begin(options, seed, dynamics_seed)
        walk.position = self.salt % 3
        return walk


class RacesOnKeys(Faulty, reported="C-14 F-08 N-08", perhaps="C-82"):
    """The key is remembered only once the sessions exist, so calls at the same time all create some."""

    async def once(self, request: Any, create: Any) -> Any:
        if request.key and request.key not in self.keys and len(request.key.encode()) <= 128:
            reply = asyncio.ensure_future(create())
            await asyncio.sleep(1.0)
            await reply
            self.keys[request.key] = (
                type(request).__name__.encode() + request.SerializeToString(deterministic=True),
                reply,
            )
            return reply.result()
        return await super().once(request, create)


class IgnoresOptions(Faulty, reported="C-19 C-56 C-89"):
    """Unknown options are dropped in silence."""

    def read_options(self, struct: Any) -> dict[str, Any]:
        for name in set(struct.fields) - {"length", "slip"}:
            del struct.fields[name]
        return super().read_options(struct)


class GuessesOptions(Faulty, reported="C-20"):
    """An option of a wrong type is replaced by its default."""

    def read_options(self, struct: Any) -> dict[str, Any]:
        for name in ("length", "slip"):
            if name in struct.fields and not struct.fields[name].HasField("number_value"):
                del struct.fields[name]
        return super().read_options(struct)


class IgnoresRanges(Faulty, reported="C-20"):
    """Options beyond their bounds are moved to them in silence."""

    def read_options(self, struct: Any) -> dict[str, Any]:
        for name, value in struct.fields.items():
            if name in PROPERTIES and value.HasField("number_value"):
                rule = PROPERTIES[name]
                value.number_value = min(max(value.number_value, rule["minimum"]), rule["maximum"])
        return super().read_options(struct)


class RoundsOptions(Faulty, reported="C-20"):
    """A fraction is cut to the whole number below it."""

    def read_options(self, struct: Any) -> dict[str, Any]:
        if "length" in struct.fields and struct.fields["length"].HasField("number_value"):
            struct.fields["length"].number_value //= 1
        return super().read_options(struct)


class UsesUpKeys(Faulty, reported="C-24"):
    """A call that failed is remembered under its key."""

    async def once(self, request: Any, create: Any) -> Any:
        known = self.keys.get(request.key)
        try:
            return await super().once(request, create)
        except Refused as error:
            if request.key and known is None and error.status.details:
                failed = asyncio.get_running_loop().create_future()
                failed.set_exception(error)
                self.keys[request.key] = (b"failed", failed)
            raise


class KeepsKeysByKind(Faulty, reported="F-08 N-08"):
    """A key of a Fork is free for an Open."""

    async def once(self, request: Any, create: Any) -> Any:
        if request.key and len(request.key.encode()) <= 128:
            known = copy.copy(request)
            known.key = type(request).__name__ + request.key[:100]
            return await super().once(known, create)
        return await super().once(request, create)


class WrapsMembers(Faulty, reported="C-25"):
    """Members are numbered with 32 bits, and then from 0 again."""

    def members(self, request: Any) -> Any:
        count = self.admit(request.count)
        return [(request.first_member + number) % 2**32 for number in range(count)]


class PoisonsKeys(Faulty, reported="C-82", perhaps="C-14"):
    """An Open whose caller leaves is abandoned, and its key for ever with it."""

    async def Open(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        if not request.key:
            await asyncio.sleep(0.05)
            return await super()._unary(context, self.open(request))
        if request.key not in self.keys:
            self.keys[request.key] = (b"abandoned", asyncio.get_running_loop().create_future())
            await asyncio.sleep(1.0)
            del self.keys[request.key]
        return await super()._unary(context, self.open(request))
