"""Wrong servers, one for each way to break the contract that the check must find."""

from tests.tools.check.faults import copying, opening, serving, stepping, streaming
from tests.tools.check.faults.faulty import Faulty

FAULTS: tuple[type[Faulty], ...] = tuple(
    kind
    for module in (opening, stepping, serving, streaming, copying)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Faulty) and kind.__module__ == module.__name__
)
