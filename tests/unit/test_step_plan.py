"""What a stage is told of layer groups that it holds no layer of: nothing."""

from __future__ import annotations

from kvferry.connector.wire.step_plan import KeepLease, LeaseGrant, Load, PeerEngine, StepPlan, by_region, pack_ids

PEER = PeerEngine("p", 1, 2, 30.0, ())
IDS = tuple(pack_ids([n]) for n in range(3))


def test_a_plan_of_some_groups() -> None:
    plan = StepPlan(
        leases=(LeaseGrant("a", b"t" * 16, 9, IDS),), keeps=(KeepLease("b", b"t" * 16, PEER, False),),
        loads=(Load("b", b"t" * 16, PEER, IDS, ((0, 9), (1, 9), (2, 9))),),
    )  # fmt: skip
    some = by_region(plan, (0, 2))
    assert some.leases[0].block_ids == some.loads[0].block_ids == (IDS[0], IDS[2])
    assert some.loads[0].tokens == ((0, 9), (2, 9)) and some.keeps == plan.keeps
    assert by_region(plan, (0, 1, 2)) == plan and by_region(plan, ()).loads[0].block_ids == ()
