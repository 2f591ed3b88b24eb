"""The training loop: sync weights, collect, filter, update, log, evaluate, save."""

from __future__ import annotations

from starpod.trainer.run.interrupts import Interrupted
from starpod.trainer.run.progress import StopReason
from starpod.trainer.run.run import Run


async def train(run: Run) -> StopReason:
    """Train until the run has a reason to stop, and return that reason.

    A signal ends the run. Episodes in play stop at once, whereas an update is finished first. The run also ends if the
    engine or all servers fail. In each case the finished steps are saved. With `collect.max_staleness`, groups
    for later steps are played during an update (rollout/ahead.py).
    """
    try:
        return await _train(run)
    except Interrupted as error:
        await run.persistence.rescue(error)
        reason = run.schedule.reason_to_stop()
        assert reason is not None  # a signal is one
        await run.end(reason)
        return reason
    except Exception as error:
        await run.persistence.rescue(error)
        raise


async def _train(run: Run) -> StopReason:
    await run.prepare()
    if run.schedule.first_evaluation_is_due:
        await run.evaluate()
        await run.persistence.save()
    while not (reason := run.schedule.reason_to_stop()):
        run.begin_step()
        await run.sync()
        groups = await run.collect()
        kept_groups = run.filter(groups)
        await run.learn(kept_groups)
        run.finish_step()
        if run.schedule.evaluation_is_due:
            await run.evaluate()
        if run.schedule.checkpoint_is_due:
            await run.persistence.save()
    await run.finish(reason)
    return reason
