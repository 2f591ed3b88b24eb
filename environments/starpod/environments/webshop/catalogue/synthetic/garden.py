"""Kinds of products: home and garden."""

from __future__ import annotations

from functools import partial

from starpod.environments.webshop.catalogue.synthetic.kind import kind

garden = partial(kind, "garden")

FURNITURE = "Home & Kitchen > Furniture > "
DECOR = "Home & Kitchen > Home D\u00e9cor Products > "
BEDDING = "Home & Kitchen > Bedding > "
LIGHT = "Tools & Home Improvement > Lighting & Ceiling Fans > "

KINDS = (
    garden(
        "floor lamps",
        LIGHT + "Lamps & Shades > Floor Lamps",
        price=(28, 260),
        options={"color": 0.4, "style": 0.1},
        nouns="floor lamp, arc floor lamp, tripod floor lamp, reading lamp, torchiere floor lamp, corner floor lamp",
        is_="easy assemble, height adjustable, energy efficient, mid century, space saving, assembly required",
        has="glass shade, steel frame, remote control, bronze finish, wood frame, brushed nickel",
        for_="living room, home office, dining room, kids room, reading corner",
        made="linen, brushed steel, marble, rattan, walnut, brass, frosted glass",
        parts="shade, pole, foot switch, weighted base, cord, bulb",
        does="casts a warm and even light, dims in three steps, reaches over the arm of a sofa, takes standard bulbs, "
        "stands firm on carpet, turns on with the foot",
    ),
    garden(
        "console tables",
        FURNITURE + "Living Room Furniture > Tables > Sofa & Console Tables",
        price=(55, 880),
        options={"wood_color": 0.4, "dimension": 0.2},
        nouns="console table, sofa table, entryway table, hall table, narrow console table, accent table",
        is_="easy assemble, fully assembled, space saving, mid century, heavy duty, assembly required",
        has="solid wood, storage shelves, metal frame, wood finish, two drawers, steel legs",
        for_="living room, entryway and hallway, storage space, home decor, dining room",
        made="reclaimed fir, acacia, engineered wood, iron, mango wood, tempered glass, oak veneer",
        parts="tabletop, drawer, lower shelf, leg, adjustable foot, handle, frame",
        does="slips behind a couch without crowding the room, holds keys and mail by the door, "
        "wipes clean with a damp cloth, "
        "stays level on old floors, shows off lamps and plants, goes together in twenty minutes",
    ),
    garden(
        "coffee tables",
        FURNITURE + "Living Room Furniture > Tables > Coffee Tables",
        price=(60, 720),
        options={"wood_color": 0.4, "dimension": 0.2},
        nouns="coffee table, lift top coffee table, nesting coffee tables, round coffee table, glass coffee table",
        is_="easy clean, easy assemble, mid century, space saving, assembly required, heavy duty",
        has="tempered glass, solid wood, metal legs, storage space, steel frame, hidden compartment",
        for_="living room, small spaces, home office, apartment living, game nights",
        made="rubber wood, walnut veneer, tempered glass, iron, faux marble, bamboo",
        parts="top, shelf, drawer, hinge, leg, edge, frame",
        does="lifts to the height of a desk, hides blankets and remotes, carries up to 200 pounds, "
        "has rounded corners for small children, resists rings from cups, slides easily on its pads",
    ),
    garden(
        "ottomans",
        FURNITURE + "Accent Furniture > Ottomans",
        price=(32, 310),
        options={"color": 0.55, "dimension": 0.2},
        nouns="storage ottoman, footrest, pouf ottoman, folding ottoman bench, round ottoman, vanity stool",
        is_="easy install, non slip, easy clean, space saving, fully assembled, mid century",
        has="faux leather, storage space, solid wood legs, high density foam, button tufted top, memory foam",
        for_="living room, bedroom end, entryway seating, dorm room, dressing table",
        made="velvet, faux leather, linen, high-density foam, chenille, rubber wood",
        parts="lid, cushion, leg, lining, handle, seat",
        does="folds flat when it is not needed, holds toys and throws, seats a guest in a pinch, opens with one hand, "
        "keeps its shape over years, matches most sofas",
    ),
    garden(
        "home office chairs",
        FURNITURE + "Home Office Furniture > Home Office Chairs",
        price=(48, 460),
        options={"color": 0.55},
        nouns="office chair, desk chair, ergonomic chair, gaming chair, drafting chair, executive chair",
        is_="height adjustable, easy assemble, heavy duty, easy install, non slip",
        has="lumbar support, memory foam, pu leather, mesh back, arm rests, metal base",
        for_="home office, back pain, long hours, gaming setups, conference rooms",
        made="breathable mesh, bonded leather, molded foam, nylon, aluminum, steel",
        parts="seat cushion, headrest, armrest, gas lift, caster, backrest, base",
        does="follows the curve of the spine, reclines and locks, rolls quietly on hard floors, "
        "turns all the way around, "
        "keeps the back cool, supports up to 300 pounds",
    ),
    garden(
        "bedframes",
        FURNITURE + "Bedroom Furniture > Beds, Frames & Bases > Bed Frames",
        price=(75, 690),
        options={"bed_size": 0.6, "color": 0.25},
        nouns="platform bed frame, metal bed frame, upholstered bed, daybed with trundle, bunk bed, storage bed",
        is_="easy assemble, heavy duty, noise free, king size, queen size, assembly required",
        has="box spring, wood slats, metal frame, storage drawers, button tufted headboard, solid wood",
        for_="kids room, guest room, memory foam mattresses, small bedrooms, dorm room",
        made="carbon steel, pine, linen, velvet, iron, faux leather, plywood slats",
        parts="headboard, slat, side rail, center leg, trundle, drawer, footboard",
        does="needs no other base, never squeaks, leaves room for boxes below, holds up to 800 pounds, "
        "arrives in one box with tools, keeps the mattress from sliding",
    ),
    garden(
        "mattresses",
        FURNITURE + "Bedroom Furniture > Mattresses & Box Springs > Mattresses",
        price=(95, 1150),
        options={"bed_size": 0.7},
        nouns="memory foam mattress, hybrid mattress, crib mattress, futon mattress, folding mattress, mattress topper",
        is_="high density, king size, queen size, certified safe, machine washable, medium firm",
        has="memory foam, cooling gel, pocket springs, bamboo cover, non slip bottom, green tea",
        for_="back pain, side sleepers, guest room, bunk beds, camping and sleepovers",
        made="gel memory foam, bamboo fabric, natural latex, steel coils, tencel, cotton",
        parts="cover, comfort layer, edge, coil, zipper, support core",
        does="lets heat escape, keeps one sleeper from waking the other, springs back within a day, "
        "eases pressure on hips and shoulders, fits in the trunk of a car, comes rolled in a box",
    ),
    garden(
        "decorative pillows",
        BEDDING + "Decorative Pillows, Inserts & Covers > Throw Pillow Covers",
        price=(7, 46),
        options={"color": 0.6, "pillow_size": 0.55},
        nouns="throw pillow cover, pillow covers, lumbar pillow, cushion cover, outdoor pillow, boho pillow cover",
        is_="machine washable, super soft, double sided, easy clean, eco friendly, water proof",
        has="hidden zipper, faux fur, cotton linen, tassel trim",
        for_="living room, home decor, couch and bed, patio furniture, holiday season",
        made="velvet, cotton linen, chenille, corduroy, faux fur, jute",
        parts="zipper, seam, tassel, insert, print, backing",
        does="slips on in seconds, keeps its color after many washes, feels soft on the cheek, brightens a plain sofa, "
        "hides crumbs between washes, does not pill",
    ),
    garden(
        "throw blankets",
        BEDDING + "Blankets & Throws > Throws",
        price=(14, 88),
        options={"color": 0.6, "blanket_size": 0.5},
        nouns="throw blanket, fleece blanket, weighted blanket, knitted throw, sherpa blanket, electric throw",
        is_="super soft, machine washable, light weight, double sided, fade resistant, king size",
        has="faux fur, double stitching, tassel fringe, printed technology, microfiber fleece",
        for_="living room, cold evenings, kids and adults, couch and bed, picnics and travel",
        made="sherpa, coral fleece, chenille, organic cotton, flannel, acrylic yarn",
        parts="hem, fringe, pattern, filling, backing, gift ribbon",
        does="warms without weighing down, comes out of the dryer soft, covers two on a couch, does not shed, "
        "folds small enough for a suitcase, keeps pets happy too",
    ),
    garden(
        "wall art",
        DECOR + "Wall Art > Posters & Prints",
        price=(9, 180),
        options={"dimension": 0.5, "art_style": 0.35},
        nouns="canvas wall art, framed print, metal wall sign, wall poster, tapestry, abstract painting, "
        "botanical print set",
        is_="ready hang, hand painted, easy install, high quality, fade resistant, wood framed",
        has="wood frame, printing technology, stretched canvas, hanging hardware, vivid colors",
        for_="living room, home office, dining room, kids room, bathroom walls, home decor",
        made="canvas, solid pine, archival paper, aluminum, eco ink, linen",
        parts="frame, print, hook, border, backing board, corner protector",
        does="arrives ready for the nail, keeps its colors in sunlight, turns an empty wall into a focal point, "
        "suits modern and rustic rooms, makes a thoughtful housewarming gift",
    ),
    garden(
        "candles",
        DECOR + "Candles & Holders > Candles > Jar Candles",
        price=(8, 58),
        options={"scent": 0.65, "count": 0.15},
        nouns="scented candle, soy candle, pillar candle, jar candle, flameless candle, tealight candles",
        is_="long lasting, lead free, hand poured, eco friendly, clean burning, non toxic",
        has="soy wax, essential oils, cotton wick, natural ingredients, wooden lid",
        for_="living room, bath time, gift giving, yoga and meditation, wedding decorations",
        made="soy wax, beeswax, coconut wax, eucalyptus oil, cedar, amber glass",
        parts="wick, jar, lid, label, wax, gift box",
        does="burns for fifty hours, fills the room without smoke, leaves no soot on the glass, "
        "calms after a long day, "
        "can be reused as a planter",
    ),
    garden(
        "live plants",
        "Patio, Lawn & Garden > Gardening & Lawn Care > Plants, Seeds & Bulbs > Indoor Plants",
        price=(9, 85),
        options={"count": 0.25, "pot": 0.25},
        nouns="succulent plants, snake plant, fern plant, air plants, bonsai tree, pothos plant, herb seed kit",
        is_="easy care, fully rooted, air purifying, pet friendly, hand picked, low light",
        has="ceramic pot, drainage hole, nursery pot, care card, organic soil",
        for_="living room, office desk, wedding favors, beginners, dining table",
        made="peat-free soil, coconut fiber, ceramic, terracotta, volcanic rock",
        parts="root ball, leaf, pot, saucer, moss, plant food",
        does="forgives a missed watering, cleans the air while you work, grows to about two feet, "
        "ships in a padded box, "
        "thrives in indirect light, makes a living gift",
    ),
)
