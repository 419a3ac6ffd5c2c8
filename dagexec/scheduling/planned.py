"""A policy for one net: asked for its order, or begun for a number of workers, and told what it did wrong."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import field, replace

from dagexec.errors import PolicyError
from dagexec.platform.records import dataclass
from dagexec.scheduling.policy import Chains, Policy, name_of


def decides_in_runs(policy: Policy) -> bool:
    """False for one of fixed priorities."""
    return type(policy).choose is not Policy.choose


@dataclass(frozen=True, eq=False)
class PlannedPolicy:
    """A policy that decides in runs, and the chains that it decides about."""

    policy: Policy
    chains: Chains
    _begun: dict[int, Policy] = field(default_factory=dict)

    def begun(self, workers: int) -> Policy:
        """A copy that has begun for so many workers. Raises PolicyError where that failed."""
        found = self._begun.get(workers)
        if found is None:
            found = copy.copy(self.policy)
            try:
                found.begin(replace(self.chains, workers=workers))
            except Exception as error:
                raise policy_error(self.policy, self.chains, f"failed in begin: {_in_words(error)}") from error
            self._begun[workers] = found
        return found

    def failed(self, error: Exception) -> PolicyError:
        """It raised `error` when it was to choose."""
        return policy_error(self.policy, self.chains, f"failed in choose: {_in_words(error)}")

    def wrong(self, what: str, chain: int | None = None) -> PolicyError:
        """It did `what`, with a chain."""
        return policy_error(self.policy, self.chains, what, chain)


def checked_order(policy: Policy, chains: Chains) -> Sequence[int]:
    """The order that `policy` gives. Raises PolicyError unless that has every chain once."""
    try:
        order = list(policy.order(chains))
    except Exception as error:
        raise policy_error(policy, chains, f"failed in order: {_in_words(error)}") from error
    count, seen = len(chains.names), set[int]()
    for chain in order:
        if not isinstance(chain, int) or not 0 <= chain < count:
            raise policy_error(policy, chains, f"orders {chain!r:.80}; chains have the numbers 0 to {count - 1}")
        if chain in seen:
            raise policy_error(policy, chains, "has it twice in its order", chain)
        seen.add(chain)
    forgotten = next((chain for chain in range(count) if chain not in seen), None)
    if forgotten is not None:
        raise policy_error(policy, chains, "forgets it in its order", forgotten)
    return order


def checked_pieces(policy: Policy, chains: Chains) -> Sequence[int]:
    """The limits that `policy` sets. Raises PolicyError unless there is one of at least 1 for every chain, or none."""
    try:
        limits = list(policy.pieces(chains))
    except Exception as error:
        raise policy_error(policy, chains, f"failed in pieces: {_in_words(error)}") from error
    count = len(chains.names)
    if limits and len(limits) != count:
        raise policy_error(policy, chains, f"limits the pieces of {len(limits)} chains; there are {count}")
    for chain, limit in enumerate(limits):
        if not isinstance(limit, int) or limit < 1:
            raise policy_error(policy, chains, f"lets it have {limit!r:.80} pieces; at least 1 is needed", chain)
    return limits


def policy_error(policy: Policy, chains: Chains, what: str, chain: int | None = None) -> PolicyError:
    """The error for a policy that did `what` with a chain."""
    which = "" if chain is None else f", chain {chain} (from {chains.names[chain]})"
    name = name_of(policy)
    return PolicyError(f"net {chains.net!r}{which}: policy {name!r} {what}", policy=name, net=chains.net, chain=chain)


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
