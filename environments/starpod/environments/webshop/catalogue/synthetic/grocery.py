"""Kinds of products: grocery."""

from __future__ import annotations

from functools import partial

from starpod.environments.webshop.catalogue.synthetic.kind import kind

grocery = partial(kind, "grocery")

FOOD = "Grocery & Gourmet Food > "
SNACKS = FOOD + "Snack Foods > "

KINDS = (
    grocery(
        "party mix",
        SNACKS + "Party Mix & Trail Mix",
        price=(6, 44),
        options={"flavor": 0.35, "ounce_pack": 0.35},
        nouns="trail mix, party mix, snack mix, nut and fruit mix, rice cracker mix",
        is_="gluten free, non gmo, individually wrapped, low carb, plant based, ready eat",
        has="resealable bag, protein serving, dried cranberries, dark chocolate, natural flavors",
        for_="on the go, lunch boxes, movie nights, hiking and camping, game day",
        made="almonds, cashews, raisins, pumpkin seeds, pretzels, peanuts, coconut chips",
        parts="bag, blend, crunch, seasoning, tub",
        does="keeps hunger away between meals, balances sweet and salty, stays fresh after opening, "
        "satisfies a crowd, gives energy on the trail",
    ),
    grocery(
        "beverages",
        FOOD + "Beverages > Bottled Beverages, Water & Drink Mixes",
        price=(5, 48),
        options={"flavor": 0.5, "drink_pack": 0.4},
        nouns="sparkling water, drink mix, lemonade, energy drink, coconut water, fruit juice, iced tea",
        is_="sugar free, caffeine free, zero sugar, non alcoholic, low calorie, gluten free, keto friendly",
        has="natural flavors, real fruit, vitamin c, electrolytes added",
        for_="hot days, kids and adults, workout recovery, cocktail mixing, lunch boxes",
        made="spring water, lime juice, ginger, stevia, hibiscus, green tea, passion fruit",
        parts="can, bottle, flavor, fizz, pouch, straw",
        does="refreshes without a sugar crash, tastes like ripe fruit, mixes in seconds, is best served over ice, "
        "comes in cans that recycle",
    ),
    grocery(
        "coffee",
        FOOD + "Beverages > Coffee > Ground Coffee",
        price=(7, 52),
        options={"coffee_flavor": 0.4, "ounce_pack": 0.4},
        nouns="ground coffee, whole bean coffee, coffee pods, instant coffee, cold brew coffee, espresso beans",
        is_="caffeine free, certified organic, fair trade, non gmo, rich creamy, keto friendly",
        has="natural flavors, arabica beans, dark chocolate, low acid, resealable bag",
        for_="office kitchens, french press, cold mornings, espresso machines, gift giving",
        made="arabica, robusta, hazelnut, cocoa, vanilla, chicory",
        parts="roast, aroma, crema, bag, valve, grind",
        does="brews smooth with no bitter end, smells of cocoa and toast, is roasted in small batches, "
        "makes about forty cups, suits any drip machine",
    ),
    grocery(
        "tea",
        FOOD + "Beverages > Tea > Herbal",
        price=(5, 38),
        options={"tea_flavor": 0.45, "tea_count": 0.4},
        nouns="green tea, herbal tea, black tea, matcha powder, loose leaf tea, chai tea, rooibos tea",
        is_="caffeine free, certified organic, individually wrapped, non gmo, sugar free, gluten free",
        has="natural ingredients, lemon ginger, natural flavors, tea bags, dried flowers",
        for_="bedtime, digestion, cold season, iced tea, afternoon breaks",
        made="chamomile, peppermint, lemongrass, cinnamon, jasmine, turmeric, bergamot",
        parts="tea bag, tin, leaf, sachet, aroma, blend",
        does="steeps in three minutes, soothes before bed, tastes bright without milk, can be brewed twice, "
        "is grown on small farms",
    ),
    grocery(
        "grocery cookies",
        SNACKS + "Cookies",
        price=(5, 36),
        options={"flavor": 0.4, "ounce_pack": 0.35},
        nouns="cookies, shortbread cookies, oatmeal cookies, chocolate chip cookies, biscotti, ginger snaps, "
        "wafer cookies",
        is_="gluten free, individually wrapped, soft baked, nut free, plant based, non gmo, sugar free",
        has="dark chocolate, natural ingredients, real butter, whole grain",
        for_="birthday party, lunch boxes, coffee breaks, holiday baskets, kids and adults",
        made="oats, brown butter, cocoa, almond flour, sea salt, cane sugar",
        parts="crumb, chip, tin, filling, pouch, tray",
        does="crumbles just right, tastes like homemade, dunks without falling apart, comes in packs for two, "
        "is baked in a nut-free kitchen",
    ),
    grocery(
        "candy & chocolate",
        FOOD + "Candy & Chocolate > Chocolate Bars",
        price=(5, 46),
        options={"flavor": 0.4, "ounce_pack": 0.3},
        nouns="chocolate bars, gummy candy, dark chocolate, milk chocolate truffles, hard candy, caramels, licorice",
        is_="individually wrapped, gluten free, sugar free, fat free, dairy free, non gmo, hand crafted",
        has="milk chocolate, dark chocolate, natural flavors, cocoa butter",
        for_="valentine day, birthday party, party favors, baby shower, gift giving",
        made="cocoa, sea salt, hazelnuts, caramel, orange peel, raspberries",
        parts="bar, center, wrapper, shell, gift box, bag",
        does="melts slowly on the tongue, snaps cleanly, is not too sweet, fills a candy bowl for weeks, "
        "brings back childhood memories",
    ),
    grocery(
        "meat snacks",
        SNACKS + "Meat Snacks > Jerky",
        price=(7, 56),
        options={"meat_flavor": 0.5, "ounce_pack": 0.4},
        nouns="beef jerky, turkey sticks, meat sticks, salmon jerky, bacon jerky, biltong",
        is_="gluten free, low carb, ready eat, grass fed, keto friendly, sugar free, individually wrapped",
        has="protein serving, natural ingredients, simple ingredients, resealable bag, sea salt",
        for_="on the go, gym workout, road trips, lunch boxes, hunting season",
        made="beef, black pepper, hickory smoke, turkey, brown sugar, garlic",
        parts="strip, pouch, marinade, stick, bite, spice rub",
        does="stays tender for months, packs ten grams into a stick, is smoked for twelve hours, "
        "needs no refrigeration, has a slow and friendly heat",
    ),
    grocery(
        "pantry staples",
        FOOD + "Pantry Staples > Sauces, Gravies & Marinades",
        price=(4, 40),
        options={"flavor": 0.25, "ounce_pack": 0.45},
        nouns="hot sauce, pasta sauce, olive oil, basmati rice, maple syrup, peanut butter, seasoning blend, "
        "lentil soup",
        is_="gluten free, non gmo, low sodium, certified organic, dairy free, cold pressed, ready eat",
        has="natural ingredients, extra virgin, roasted garlic, sea salt",
        for_="weeknight dinners, grilled meat, salads and dips, meal prep, baking and cooking",
        made="tomatoes, garlic, olives, chili, basil, smoked paprika, honey",
        parts="jar, bottle, spice, texture, lid, finish",
        does="turns leftovers into dinner, pours without dripping, is simmered for hours, "
        "keeps for a year in the pantry, "
        "adds depth without heat",
    ),
    grocery(
        "breakfast foods",
        FOOD + "Breakfast Foods > Cereals",
        price=(5, 42),
        options={"flavor": 0.35, "ounce_pack": 0.45},
        nouns="granola, oatmeal cups, breakfast cereal, pancake mix, muesli, protein waffles",
        is_="gluten free, whole grain, plant based, low sugar, non gmo, keto friendly, easy prepare",
        has="protein serving, dried fruits, natural flavors, chia seeds, real honey",
        for_="busy mornings, kids and adults, yogurt bowls, lunch boxes, camping trips",
        made="rolled oats, maple, cinnamon, blueberries, quinoa, flax, walnuts",
        parts="cluster, pouch, cup, crunch, spoonful, box",
        does="is ready in two minutes, stays crunchy in milk, fills you up until noon, is toasted slowly, "
        "bakes into muffins as well",
    ),
    grocery(
        "popcorn",
        SNACKS + "Popcorn > Popped",
        price=(5, 38),
        options={"popcorn_flavor": 0.5, "ounce_pack": 0.35},
        nouns="popcorn, kettle corn, popcorn kernels, microwave popcorn, caramel corn, popcorn tin",
        is_="gluten free, non gmo, whole grain, fat free, ready eat, low calorie",
        has="sea salt, real butter, natural flavors, coconut oil, white cheddar",
        for_="movie nights, lunch boxes, gift giving, game day, office snacks",
        made="white corn, sea salt, butter, caramel, cheddar, coconut oil",
        parts="kernel, bag, tin, drizzle, hull, topping",
        does="pops up big and tender, does not stick in the teeth, vanishes before the credits, "
        "stays crisp in the tin, is popped in small kettles",
    ),
    grocery(
        "food & beverage gifts",
        FOOD + "Food & Beverage Gifts > Snack Gifts",
        price=(16, 110),
        options={"gift": 0.35},
        nouns="gift basket, snack box, tea gift set, chocolate gift box, cheese gift basket, spice gift set",
        is_="hand crafted, individually wrapped, gift ready, gluten free, ready eat",
        has="gift basket, perfect gift, greeting card, quality ingredients, milk chocolate",
        for_="birthday party, valentine day, mothers day, college students, new parents",
        made="nuts, dried fruit, crackers, truffles, cheese straws, caramels",
        parts="basket, ribbon, card, keepsake tin, sampler, crate",
        does="arrives wrapped and ready, pleases the whole office, keeps for months unopened, "
        "says thank you better than flowers, lets them try ten flavors",
    ),
    grocery(
        "dried fruits & raisins",
        FOOD + "Produce > Dried Fruits & Vegetables > Dried Fruits",
        price=(6, 40),
        options={"dried": 0.35, "ounce_pack": 0.45},
        nouns="dried mango, freeze dried fruit, raisins, dried apricots, banana chips, dried cranberries, dates",
        is_="gluten free, sugar free, non gmo, certified organic, ready eat, nut free, freeze dried",
        has="resealable bag, natural ingredients, dietary fiber, real fruit, vitamin c",
        for_="baking and cooking, lunch boxes, on the go, kids and adults, trail mix",
        made="mango, apricots, strawberries, figs, bananas, apples, cherries",
        parts="slice, pouch, piece, bite, fruit, bag",
        does="tastes of nothing but fruit, chews soft and never leathery, sweetens oatmeal, travels well in a pocket, "
        "is dried in the sun",
    ),
)
