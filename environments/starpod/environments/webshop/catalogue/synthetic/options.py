"""The options that products come in: names of groups and their values, in the order in which a shop lists them."""

from __future__ import annotations

from starpod.environments.webshop.catalogue.synthetic.kind import split

COLORS = split(
    "Black, White, Grey, Navy Blue, Red, Pink, Light Blue, Dark Green, Beige, Brown, Khaki, Wine Red, Purple, Yellow, "
    "Orange, Army Green, Royal Blue, Coffee, Ivory, Lavender, Mint Green, Teal, Rose Gold, Silver, Gold, Burgundy, "
    "Light Grey, Dark Grey, Sky Blue, Hot Pink, Apricot, Camel, Charcoal, Cream, Turquoise, Olive, Rust, Mustard, "
    "Sage, "
    "Peach, Leopard, Multicolor, Champagne, Copper, Dusty Rose, Emerald, Graphite, Indigo, Lilac, Maroon, Mauve, "
    "Midnight Blue, Nude, Plum, Sand, Taupe, Stone, Denim Blue, Coral, Aqua"
)
_OUNCES = ("4 Ounce", "6 Ounce", "8 Ounce", "10 Ounce", "12 Ounce", "1 Pound", "1.5 Pound", "2 Pound", "3.5 Ounce")
_PACKS = (1, 2, 3, 4, 6, 8, 12, 24)

ORDERED: dict[str, tuple[str, tuple[str, ...]]] = {
    "clothes": ("Size", split("X-Small, Small, Medium, Large, X-Large, XX-Large, 3X-Large, 4X-Large")),
    "womens_shoes": ("Size", split("5, 5.5, 6, 6.5, 7, 7.5, 8, 8.5, 9, 9.5, 10, 11")),
    "mens_shoes": ("Size", split("7, 7.5, 8, 8.5, 9, 9.5, 10, 10.5, 11, 11.5, 12, 13, 10 Wide, 11 Wide")),
    "waist": ("Size", tuple(f"{waist}W x {length}L" for waist in range(28, 46, 2) for length in (30, 32, 34))),
    "bed_size": ("Size", split("Twin, Twin XL, Full, Queen, King, California King")),
    "pillow_size": ("Size", ('12" x 20"', '16" x 16"', '18" x 18"', '20" x 20"', '22" x 22"', '24" x 24"')),
    "blanket_size": (
        "Size",
        split("30x40 inches, 40x50 inches, 50x60 inches, 60x80 inches, 90x90 inches, 108x90 inches"),
    ),
    "volume": ("Size", split("2 Fl Oz, 3.4 Fl Oz, 5 Fl Oz, 8 Fl Oz, 12 Fl Oz, 16 Fl Oz, 33.8 Fl Oz")),
    "cable_length": ("Size", split("1.5 Feet, 3 Feet, 6 Feet, 10 Feet, 15 Feet, 25 Feet, 50 Feet, 100 Feet")),
    "capacity": ("Size", split("16 GB, 32 GB, 64 GB, 128 GB, 256 GB, 512 GB, 1 TB")),
    "band_size": ("Size", split("38/40/41mm, 42/44/45mm, 20mm, 22mm, Small, Large")),
    "length": ("Size", tuple(f"{inches} Inch" for inches in range(8, 32, 2))),
    "tea_count": (
        "Size",
        split("16 Count, 20 Count (Pack of 1), 20 Count (Pack of 3), 20 Count (Pack of 6), 100 Count"),
    ),
    "ounce_pack": ("Size", tuple(f"{ounces} (Pack of {packs})" for ounces in _OUNCES for packs in _PACKS)),
    "drink_pack": (
        "Size",
        tuple(f"{size} (Pack of {n})" for size in ("12 Fl Oz", "16 Fl Oz", "8 Fl Oz", "2 Liter") for n in _PACKS),
    ),
    "pack": ("Size", tuple(f"{ounces} Ounce (Pack of {n})" for ounces in (3, 4, 4.7, 6) for n in (1, 2, 3, 6))),
    "count": ("Item Package Quantity", split("1, 2, 3, 4, 6, 8, 10, 12")),
    "fit": ("Fit Type", split("Men, Women, Youth, Big & Tall")),
}
"""Generator -> name of the group, and values from which a run is taken."""

DRAWN: dict[str, tuple[str, tuple[str, ...]]] = {
    "color": ("Color", COLORS),
    "wood_color": (
        "Color",
        split(
            "Natural, Walnut, Espresso, White, Black, Rustic Brown, Oak, Grey Wash, Cherry, Honey, Dark Walnut, Maple"
        ),
    ),
    "hair_color": (
        "Color",
        split(
            "Natural Black, Dark Brown, Chestnut Brown, Ash Blonde, Honey Blonde, Auburn, Burgundy, Platinum Blonde, "
            "Copper Red, Medium Brown, Silver Grey, Jet Black, Ombre Brown, Strawberry Blonde, Balayage"
        ),
    ),
    "makeup_color": (
        "Color",
        split(
            "Nude, Rosewood, Classic Red, Berry, Coral, Mauve, Hot Pink, Peach, Plum, Warm Brown, Dusty Rose, Cherry, "
            "Terracotta, Champagne, Ruby, Soft Pink, Brick, Cocoa, Sunset, Ballet"
        ),
    ),
    "dimension": (
        "Size",
        split(
            "8x10 in, 11x14 in, 12x18 in, 16x20 in, 18x24 in, 20x30 in, 24x36 in, 30x40 in, 32 x 16 x 18 inches, "
            "40 x 20 x 18 inches, 48 x 24 x 18 inches, 60x40x40cm, 80x40x45cm, 100x50x45cm, 120x60x75cm, Small, Large"
        ),
    ),
    "scent": (
        "Scent",
        split(
            "Lavender, Vanilla, Eucalyptus, Rose, Coconut, Citrus, Unscented, Sandalwood, Jasmine, Ocean Breeze, "
            "Cinnamon Apple, Fresh Linen, Peppermint, Green Tea, Honey Almond, Fig, Cedar & Sage, Pumpkin Spice, "
            "Gardenia"
        ),
    ),
    "flavor": (
        "Flavor Name",
        split(
            "Original, Chocolate, Vanilla, Strawberry, Peanut Butter, Salted Caramel, Lemon, Mixed Berry, Cinnamon, "
            "Mango, "
            "Variety Pack, Honey, Sea Salt, Maple, Orange, Peach, Raspberry, Coconut, Apple Cinnamon, Dark Chocolate, "
            "Blueberry, Watermelon, Pineapple, Ginger, Cherry, Key Lime"
        ),
    ),
    "coffee_flavor": (
        "Flavor Name",
        split("House Blend, French Vanilla, Hazelnut, Dark Roast, Medium Roast, Caramel, Mocha, Decaf, Espresso Roast"),
    ),
    "tea_flavor": (
        "Flavor Name",
        split(
            "Lemon Ginger, Peppermint, Chamomile, Earl Grey, Jasmine, Hibiscus, Cinnamon Spice, Peach, "
            "English Breakfast"
        ),
    ),
    "meat_flavor": (
        "Flavor Name",
        split(
            "Original, Teriyaki, Black Pepper, Sweet & Spicy, Hickory Smoked, Jalapeno, Barbecue, Garlic, Honey Mustard"
        ),
    ),
    "popcorn_flavor": (
        "Flavor Name",
        split("Sea Salt, White Cheddar, Caramel, Butter, Kettle Corn, Jalapeno Cheddar, Dill Pickle, Cinnamon Sugar"),
    ),
    "toothpaste_flavor": ("Flavor Name", split("Fresh Mint, Peppermint, Cinnamon, Watermelon, Bubble Gum, Spearmint")),
    "dried": ("Flavor Name", split("Mango, Apricot, Strawberry, Pineapple, Apple, Cherry, Banana, Mixed Fruit, Fig")),
    "gift": ("Style", split("Birthday, Thank You, Sympathy, Get Well, Congratulations, Holiday, Deluxe, Classic")),
    "style": (
        "Style",
        split("Modern, Classic, 1-Pack, 2-Pack, With Remote, Without Remote, Basic, Deluxe, Starter Set"),
    ),
    "bundle": ("Style", split("Camera Only, Base Bundle, Deluxe Bundle, With 32GB Card, Travel Kit, Two Batteries")),
    "phone": ("Style", split("5.4 inch, 5.8 inch, 6.1 inch, 6.5 inch, 6.7 inch, 10.1 inch, 40mm, 44mm")),
    "skin_type": ("Style", split("Dry Skin, Oily Skin, Combination Skin, Sensitive Skin, Travel Set, Full Size")),
    "art_style": (
        "Color",
        split("Abstract Blue, Black Frame, White Frame, Natural Frame, Gold Leaves, Sunset, Forest"),
    ),
    "pot": ("Style", split("White Pot, Terracotta Pot, Black Pot, Nursery Pot, Woven Basket, Glass Bowl")),
}
"""Generator -> name of the group, and values of which some are drawn."""

PICTURED = ("Color", "Style", "Scent")
"""Groups whose values each have a picture and a price."""
