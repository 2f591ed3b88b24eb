"""The outcome of a purchase: reward, its parts, criteria and details."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starpod.env_server import Outcome

from .options import WebShopOptions
from .reward import checklist
from .shop import Shop

if TYPE_CHECKING:
    from starpod.environments.webshop.store.store import Store


def purchase_outcome(shop: Shop, store: Store, options: WebShopOptions) -> Outcome:
    """Return the outcome of the purchase that was just made in the shop."""
    grade, item, goal = shop.appraise(), shop.item(), shop.goal
    assert item is not None
    scale, is_solved = options.reward_scale, grade.reward == 1.0
    if options.reward == "graded":
        reward = grade.reward * scale
        parts = {name: share * scale for name, share in grade.parts().items()}
    else:
        reward = scale if is_solved else 0.0
        parts = {"solved": reward}
    attributes, chosen_options = checklist(item.product, goal, shop.state.options, options.ratio)
    criteria = {"purchase": True, "price": grade.r_price, "kind": grade.r_type == 1.0}
    criteria |= {f"attribute: {name}": is_matched for name, is_matched in attributes.items()}
    criteria |= {f"option: {name}": is_matched for name, is_matched in chosen_options.items()}
    info = {
        **grade.as_info(),
        "score": grade.reward,
        "asin": item.product.asin,
        "options": dict(shop.state.options),
        "price": float(store.prices[item.position]),
        "goal": goal.index,
        "goal_asin": goal.asin,
        "tagger": grade.tagger,
        "ratio": options.ratio,
        "catalogue": store.name,
        "catalogue_digest": store.digest,
    }
    return Outcome(reward, terminated=True, success=is_solved, reward_parts=parts, criteria=criteria, info=info)
