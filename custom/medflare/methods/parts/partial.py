"""Models of which only a part is shared: the entries that stay at the site, found by the type of
their layer or by their path.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from medflare.core.states import State, StateDict, batch_norm_entries, split_state


@dataclass(frozen=True)
class LocalPart:
    """Names of the state's entries that stay at the site."""

    names: frozenset[str]

    @classmethod
    def of_batch_norm(cls, network: nn.Module) -> "LocalPart":
        """Weights and running statistics of every layer with running statistics (FedBN)."""
        return cls(batch_norm_entries(network))

    @classmethod
    def of_paths(cls, network: nn.Module, paths: Iterable[str]) -> "LocalPart":
        """Everything below the given modules, for example "head" (FedPer, FedRep).

        Raises:
            ValueError: a path of no module of the network.
        """
        chosen = tuple(paths)
        modules = dict(network.named_modules())
        for path in chosen:
            if path not in modules:
                top = ", ".join(sorted(name for name in modules if name and "." not in name))
                raise ValueError(f"the network has no module {path!r}; it has {top}")
        prefixes = tuple(f"{path}." for path in chosen)
        return cls(frozenset(name for name in network.state_dict() if name.startswith(prefixes)))

    def local(self, state: State) -> StateDict:
        """The entries that stay."""
        return split_state(state, self.names)[0]

    def shared(self, state: State) -> StateDict:
        """The entries that are shared."""
        return split_state(state, self.names)[1]
