"""Kinds of products: fashion."""

from __future__ import annotations

from functools import partial

from starpod.environments.webshop.catalogue.synthetic.kind import kind

fashion = partial(kind, "fashion")

WOMEN = "Clothing, Shoes & Jewelry > Women > "
MEN = "Clothing, Shoes & Jewelry > Men > "

KINDS = (
    fashion(
        "women's dresses",
        WOMEN + "Clothing > Dresses > Casual",
        price=(14, 88),
        options={"color": 0.95, "clothes": 0.95},
        nouns="maxi dress, midi dress, wrap dress, t-shirt dress, sun dress, cocktail dress, sweater dress",
        is_="machine wash, hand wash, wash cold, short sleeve, long sleeve, loose fit",
        has="elastic waist, polyester spandex, v neck, tie waist, deep pockets, floral print",
        for_="daily wear, beach vacation, wedding guests, teen girls, summer evenings",
        made="rayon, cotton jersey, chiffon, polyester spandex, linen, viscose",
        parts="neckline, hem, sleeve, waistband, pocket, skirt",
        does="flatters every figure, moves with you, packs without wrinkles, "
        "dresses up with heels and down with sneakers, "
        "stays opaque in sunlight, keeps cool on hot days",
    ),
    fashion(
        "women's tops, tees & blouses",
        WOMEN + "Clothing > Tops, Tees & Blouses > Blouses & Button-Down Shirts",
        price=(9, 48),
        options={"color": 0.95, "clothes": 0.95},
        nouns="tunic top, blouse, v neck t-shirt, tank top, crop top, off shoulder top, button down shirt",
        is_="machine wash, short sleeve, long sleeve, loose fit, hand wash, relaxed fit",
        has="polyester spandex, button closure, lace trim, round neck, unique design, ruffled hem",
        for_="daily wear, office work, teen girls, leggings and jeans, date night",
        made="cotton, polyester, rayon, modal, chiffon, lace",
        parts="collar, cuff, hem, neckline, button, back pleat",
        does="drapes softly over the hips, tucks in without bulk, pairs with jeans or skirts, does not cling, "
        "washes well and keeps its shape",
    ),
    fashion(
        "women's sweaters",
        WOMEN + "Clothing > Sweaters > Cardigans",
        price=(17, 82),
        options={"color": 0.95, "clothes": 0.9},
        nouns="cardigan, knit sweater, turtleneck sweater, open front cardigan, chunky sweater, sweater vest",
        is_="long sleeve, machine wash, hand wash, loose fit, light weight",
        has="side pockets, ribbed cuffs, button closure, cable knit, long sleeves",
        for_="daily wear, fall and winter, office work, layering, teen girls",
        made="merino blend, acrylic, cotton yarn, mohair blend, cashmere feel yarn",
        parts="cuff, hem, pocket, collar, knit, shoulder seam",
        does="keeps warm without itching, layers over a dress, holds its shape, falls just below the hip, "
        "feels like a favorite blanket",
    ),
    fashion(
        "women's pants",
        WOMEN + "Clothing > Pants > Wear to Work",
        price=(14, 68),
        options={"color": 0.9, "clothes": 0.95},
        nouns="wide leg pants, yoga pants, joggers, leggings, palazzo pants, work trousers, cargo pants",
        is_="high waist, machine wash, wide leg, straight leg, tummy control, moisture wicking, slim fit",
        has="elastic waist, drawstring closure, nylon spandex, deep pockets, elastic closure",
        for_="daily wear, yoga workout, office work, teen girls, travel days",
        made="ponte knit, nylon spandex, cotton, linen, bamboo viscose, fleece",
        parts="waistband, pocket, inseam, cuff, drawstring, gusset",
        does="stretches four ways, stays up during a workout, is not see-through, hides a phone in the pocket, "
        "looks crisp from desk to dinner",
    ),
    fashion(
        "women's pumps",
        WOMEN + "Shoes > Pumps",
        price=(22, 98),
        options={"color": 0.95, "womens_shoes": 0.95},
        nouns="pumps, stiletto heels, block heel pumps, kitten heels, pointed toe pumps, ankle strap heels",
        is_="high heel, open toe, closed toe, non slip, day comfort",
        has="rubber sole, ankle strap, memory foam, faux suede, rubber outsole",
        for_="wedding party, office work, dress shoes, prom night, daily wear",
        made="faux suede, patent leather, microfiber, satin, synthetic leather",
        parts="heel, toe box, insole, strap, buckle, lining",
        does="cushions every step, stays on without slipping, lengthens the leg, runs true to size, "
        "carries through a whole evening",
    ),
    fashion(
        "women's sandals",
        WOMEN + "Shoes > Sandals > Flats",
        price=(14, 72),
        options={"color": 0.95, "womens_shoes": 0.95},
        nouns="sandals, flip flops, wedge sandals, gladiator sandals, slide sandals, platform sandals",
        is_="open toe, non slip, quick drying, light weight",
        has="arch support, rubber sole, leather sole, ankle strap, ethylene vinyl, memory foam",
        for_="beach vacation, daily wear, walking tours, teen girls, pool side",
        made="EVA, vegan leather, cork, braided straps, jute, rubber",
        parts="footbed, strap, buckle, outsole, toe post, heel",
        does="needs no breaking in, grips wet tiles, rinses clean, gives a little extra height, supports tired feet",
    ),
    fashion(
        "women's lingerie, sleep & lounge",
        WOMEN + "Clothing > Lingerie, Sleep & Lounge > Sleep & Lounge",
        price=(12, 54),
        options={"color": 0.9, "clothes": 0.9},
        nouns="pajama set, night gown, robe, lounge set, sleep shirt, bralette, nightdress",
        is_="hand wash, machine wash, long sleeve, wide leg, short sleeve, tumble dry",
        has="elastic waistband, drawstring closure, v neck, lace trim, side pockets",
        for_="daily wear, bridal party, lazy sundays, hospital stays, teen girls",
        made="satin, modal, cotton, bamboo viscose, silk feel fabric, flannel",
        parts="waistband, collar, tie belt, pocket, hem, piping",
        does="feels cool at night, does not ride up, looks good at the breakfast table, gets softer with each wash, "
        "comes in a gift bag",
    ),
    fashion(
        "men's t-shirts & tanks",
        MEN + "Clothing > Shirts > T-Shirts",
        price=(10, 42),
        options={"color": 0.95, "clothes": 0.95, "fit": 0.25},
        nouns="t-shirt, graphic tee, henley shirt, tank top, muscle shirt, long sleeve tee, pocket t-shirt",
        is_="machine wash, short sleeve, slim fit, classic fit, regular fit, moisture wicking, wash cold",
        has="needle sleeve, cotton heather, crew neck, polyester heathers, tag free collar",
        for_="gym workout, daily wear, fathers day, summer festivals, work and weekend",
        made="ring-spun cotton, cotton heather, polyester, tri-blend jersey, bamboo",
        parts="collar, sleeve, hem, print, seam, pocket",
        does="keeps its fit wash after wash, wicks sweat on a run, lies flat under a jacket, "
        "shows a print that does not crack, "
        "feels broken in from day one",
    ),
    fashion(
        "men's dress shirts",
        MEN + "Clothing > Shirts > Dress Shirts",
        price=(18, 84),
        options={"color": 0.95, "clothes": 0.95, "fit": 0.2},
        nouns="dress shirt, button down shirt, oxford shirt, tuxedo shirt, linen shirt, flannel shirt",
        is_="slim fit, machine wash, long sleeve, regular fit, wash cold, wrinkle free, short sleeve",
        has="button closure, stretch fabric, chest pocket, spread collar, french cuffs",
        for_="office work, wedding party, formal dinners, daily wear, business travel",
        made="cotton poplin, oxford cloth, linen, stretch cotton, twill",
        parts="collar, cuff, placket, yoke, button, pocket",
        does="comes out of the dryer smooth, breathes through long meetings, stays tucked in, "
        "goes with a suit or with jeans, keeps a sharp collar",
    ),
    fashion(
        "men's pants",
        MEN + "Clothing > Pants > Casual",
        price=(18, 78),
        options={"color": 0.9, "waist": 0.95},
        nouns="chino pants, cargo pants, sweatpants, jeans, hiking pants, golf pants, joggers",
        is_="slim fit, straight leg, machine wash, relaxed fit, quick drying, water resistant",
        has="elastic waist, zipper pockets, drawstring closure, button closure, stretch fabric",
        for_="daily wear, gym workout, outdoor hiking, office work, everyday wear",
        made="stretch twill, cotton, nylon, denim, fleece, ripstop",
        parts="waistband, knee panel, fly, pocket, cuff, belt loop",
        does="gives where it needs to, dries on the trail, keeps coins in place, sits at the waist without a belt, "
        "looks neat with loafers",
    ),
    fashion(
        "men's fashion sneakers",
        MEN + "Shoes > Fashion Sneakers",
        price=(24, 128),
        options={"color": 0.95, "mens_shoes": 0.95},
        nouns="sneakers, running shoes, high top sneakers, slip on shoes, skate shoes, walking shoes",
        is_="non slip, light weight, day comfort, arch supporting, lace up",
        has="rubber sole, memory foam, arch support, rubber outsole, ethylene vinyl",
        for_="daily wear, gym workout, long shifts, walking tours, everyday wear",
        made="canvas, knit mesh, suede, vegan leather, rubber, EVA",
        parts="outsole, insole, tongue, heel tab, lace, toe cap",
        does="absorbs every step on concrete, lets the foot breathe, grips wet pavement, slips on without bending, "
        "weighs less than a phone",
    ),
    fashion(
        "men's loafers & slip-ons",
        MEN + "Shoes > Loafers & Slip-Ons",
        price=(26, 118),
        options={"color": 0.95, "mens_shoes": 0.95},
        nouns="loafers, penny loafers, driving moccasins, slip on shoes, boat shoes, house slippers",
        is_="slip resistant, non slip, hand stitched, light weight, day comfort",
        has="rubber sole, memory foam, rubber outsole, leather lining, faux fur",
        for_="office work, daily wear, driving, wedding party, indoor and outdoor",
        made="genuine leather, suede, canvas, corduroy, faux shearling",
        parts="sole, insole, stitching, heel counter, tassel, lining",
        does="goes on without laces, bends with the foot, looks smart without socks, is quiet on hardwood, "
        "molds to your foot within a week",
    ),
)
