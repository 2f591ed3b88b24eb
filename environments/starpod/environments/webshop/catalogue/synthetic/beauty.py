"""Kinds of products: beauty."""

from __future__ import annotations

from functools import partial

from starpod.environments.webshop.catalogue.synthetic.kind import kind

beauty = partial(kind, "beauty")

HAIR = "Beauty & Personal Care > Hair Care > "
SKIN = "Beauty & Personal Care > Skin Care > "
MAKEUP = "Beauty & Personal Care > Makeup > "
TOOLS = "Beauty & Personal Care > Tools & Accessories > "
ORAL = "Health & Household > Oral Care > "

KINDS = (
    beauty(
        "shampoo & conditioner",
        HAIR + "Shampoo & Conditioner > Shampoos",
        price=(7, 48),
        options={"volume": 0.3, "scent": 0.25},
        nouns="shampoo, repair shampoo, moisturizing shampoo, clarifying shampoo, shampoo and conditioner set, "
        "shampoo bar",
        is_="sulfate free, paraben free, cruelty free, plant based, color safe, certified organic",
        has="argan oil, coconut oil, tea tree, natural ingredients, hyaluronic acid, essential oils",
        for_="damaged hair, dry hair, hair growth, hair loss, dry scalp, oily hair, curly hair",
        made="biotin, keratin, rosemary, aloe, castor oil, oat milk, peppermint, ginger root",
        parts="formula, lather, pump bottle, fragrance, rich foam",
        does="rinses out without residue, brings back shine, calms an itchy scalp, tames frizz on humid days, "
        "leaves strands soft and easy to comb, protects colored hair from fading, adds volume at the roots",
    ),
    beauty(
        "hair masks",
        HAIR + "Hair Masks",
        price=(9, 52),
        options={"volume": 0.35},
        nouns="hair mask, deep conditioning hair mask, keratin hair mask, overnight hair treatment, scalp mask",
        is_="sulfate free, cruelty free, long lasting, easy use, paraben free, high quality",
        has="coconut oil, argan oil, shea butter, natural ingredients, seed oil",
        for_="dry hair, damaged hair, hair treatment, natural hair, curly hair, split ends",
        made="milk proteins, avocado, keratin, honey, olive oil, rice water, marula oil",
        parts="texture, jar, spatula, fragrance, cream",
        does="works within ten minutes, seals split ends, feeds thirsty hair from root to tip, makes detangling easy, "
        "keeps curls defined for days, restores elasticity after bleaching",
    ),
    beauty(
        "hair extensions, wigs & accessories",
        HAIR + "Hair Extensions & Wigs > Wigs",
        price=(14, 240),
        options={"hair_color": 0.7, "length": 0.6},
        nouns="lace front wig, hair extensions, clip in ponytail, curly wig, bob wig, tape in extensions, hair topper",
        is_="high quality, natural looking, easy use, heat resistant, long lasting, pre plucked",
        has="human hair, synthetic hair, baby hair, natural hair, elastic band",
        for_="daily wear, hair loss, thin hair, cosplay party, special occasions",
        made="virgin hair, silky fiber, Swiss lace, remy hair, kanekalon fiber",
        parts="cap, lace front, comb clip, adjustable strap, hairline",
        does="blends with your own hair, can be curled and straightened, sits firmly all day, does not shed or tangle, "
        "looks full from every side, breathes well in summer",
    ),
    beauty(
        "makeup palettes",
        MAKEUP + "Makeup Palettes",
        price=(8, 64),
        options={"makeup_color": 0.35},
        nouns="eyeshadow palette, makeup palette, contour palette, blush palette, face palette, glitter palette",
        is_="highly pigmented, cruelty free, long lasting, easy apply, easy carry, water proof",
        has="rose gold, vitamin e, nude shades, double mirror, natural ingredients",
        for_="eye shadow, sensitive skin, beginners, stage makeup, all skin tones",
        made="mica, jojoba oil, fine minerals, silk powder, vitamin E",
        parts="mirror, brush, shade, magnetic lid, case",
        does="blends without fallout, lasts from morning to midnight, goes on smooth and buildable, fits in a clutch, "
        "covers both matte and shimmer looks, wipes off with any cleanser",
    ),
    beauty(
        "lips makeup",
        MAKEUP + "Lips > Lipsticks",
        price=(4, 32),
        options={"makeup_color": 0.75},
        nouns="lipstick, matte lipstick, lip gloss, liquid lipstick, lip liner set, tinted lip balm, lip stain",
        is_="long lasting, cruelty free, highly pigmented, water proof, non sticky, easy apply, fragrance free",
        has="hyaluronic acid, vitamin e, coconut oil, shea butter, seed oil",
        for_="dry lips, daily wear, lip care, sensitive skin, weddings and parties",
        made="shea butter, beeswax, rosehip oil, castor seed oil, squalane",
        parts="wand, bullet, finish, cap, doe foot applicator",
        does="stays put through lunch, never feels heavy, plumps lips within minutes, does not feather or bleed, "
        "glides on in one stroke, keeps lips soft for hours",
    ),
    beauty(
        "makeup remover",
        SKIN + "Face > Cleansers > Makeup Removers",
        price=(5, 30),
        options={"count": 0.3},
        nouns="makeup remover, makeup remover pads, cleansing balm, micellar water, reusable cotton rounds, face wipes",
        is_="easy clean, eco friendly, machine washable, alcohol free, fragrance free, double sided, oil free",
        has="green tea, natural ingredients, aloe vera, bamboo cotton, vitamin e",
        for_="sensitive skin, eye makeup, dry skin, dead skin, face wash",
        made="bamboo, organic cotton, microfiber, cucumber extract, chamomile",
        parts="laundry bag, pad, dispenser, container, cloth",
        does="takes off waterproof mascara without rubbing, leaves no greasy film, replaces hundreds of wipes, "
        "dissolves foundation in seconds, is gentle around the eyes, dries quickly after washing",
    ),
    beauty(
        "skin care sets & kits",
        SKIN + "Sets & Kits",
        price=(15, 98),
        options={"skin_type": 0.2},
        nouns="skin care set, facial kit, anti aging set, serum set, spa gift set, acne treatment kit",
        is_="cruelty free, anti aging, paraben free, dermatologist tested, travel size, alcohol free",
        has="hyaluronic acid, vitamin c, salicylic acid, green tea, natural ingredients, retinol serum",
        for_="fine lines, sensitive skin, dark spots, dark circles, acne treatment, oily skin",
        made="niacinamide, collagen, peptides, ceramides, centella, rosehip",
        parts="cleanser, toner, serum, moisturizer, eye cream, gift box",
        does="evens out the complexion, firms tired skin, tightens large pores, soothes redness overnight, "
        "gives a dewy glow, locks in moisture for a full day",
    ),
    beauty(
        "scrubs & body treatments",
        SKIN + "Body > Scrubs & Body Treatments",
        price=(8, 44),
        options={"scent": 0.45, "volume": 0.2},
        nouns="body scrub, sugar scrub, coffee scrub, sea salt scrub, foot scrub, exfoliating body polish",
        is_="cruelty free, paraben free, plant based, certified organic, non toxic",
        has="coconut oil, essential oils, shea butter, tea tree, natural ingredients, dead sea salt",
        for_="dead skin, dry skin, stretch marks, rough feet, ingrown hair, sensitive skin",
        made="cane sugar, ground coffee, Himalayan salt, walnut shell, almond oil, oatmeal",
        parts="jar, wooden spoon, grain, fragrance, blend",
        does="polishes rough elbows and knees, smells like a spa day, washes off clean, wakes up tired skin, "
        "prepares legs for shaving, leaves a light layer of moisture",
    ),
    beauty(
        "women's fragrance",
        "Beauty & Personal Care > Fragrance > Women's > Eau de Parfum",
        price=(14, 130),
        options={"scent": 0.3, "volume": 0.3},
        nouns="eau de parfum, perfume oil, body mist, eau de toilette, roll on perfume, solid perfume",
        is_="long lasting, alcohol free, cruelty free, travel size, high quality",
        has="essential oils, natural ingredients, rose petals, vanilla notes, fine mist",
        for_="daily wear, date night, gift giving, sensitive skin, summer evenings",
        made="jasmine, bergamot, sandalwood, musk, amber, tonka bean, orange blossom",
        parts="spray bottle, top note, base note, heart note, atomizer",
        does="opens fresh and dries down warm, lingers on clothes until evening, is never overpowering, "
        "fits in any handbag, layers well with body lotion",
    ),
    beauty(
        "refillable containers",
        TOOLS + "Bags & Cases > Refillable Containers",
        price=(5, 28),
        options={"color": 0.45, "count": 0.3},
        nouns="travel bottles, spray bottle, cosmetic jars, lotion dispenser, refillable perfume atomizer, pump bottle",
        is_="leak proof, bpa free, easy clean, easy carry, travel size, high quality, eco friendly",
        has="rose gold, fine mist, stainless steel, wide mouth, storage case",
        for_="travel bottles, essential oils, hand soap, face wash, body lotion",
        made="silicone, amber glass, PET plastic, aluminum, frosted glass",
        parts="cap, pump head, label, funnel, nozzle, lid",
        does="passes airport security, squeezes out the last drop, stands on the shelf without tipping, "
        "seals tight even in checked bags, refills through a wide opening",
    ),
    beauty(
        "toothpaste",
        ORAL + "Toothpaste",
        price=(4, 26),
        options={"pack": 0.3, "toothpaste_flavor": 0.25},
        nouns="toothpaste, whitening toothpaste, charcoal toothpaste, kids toothpaste, toothpaste tablets",
        is_="fluoride free, clinically proven, cruelty free, sulfate free, plant based, travel size",
        has="natural ingredients, coconut oil, tea tree, baking soda, aloe vera",
        for_="teeth whitening, sensitive teeth, bad breath, fresh breath, oral hygiene, cavity prevention",
        made="xylitol, activated charcoal, peppermint oil, hydroxyapatite, sea salt",
        parts="tube, cap, foam, paste, recyclable box",
        does="lifts coffee stains, protects enamel twice a day, tastes fresh and never chalky, helps against plaque, "
        "keeps gums healthy, leaves teeth smooth",
    ),
    beauty(
        "shave & hair removal",
        "Beauty & Personal Care > Shave & Hair Removal > Women's > Trimmers",
        price=(6, 72),
        options={"color": 0.35},
        nouns="eyebrow trimmer, facial hair remover, electric razor, wax kit, bikini trimmer, safety razor, epilator",
        is_="non slip, easy use, easy clean, water proof, high quality, pain free, easy carry",
        has="stainless steel, led light, replacement heads, usb charging, aloe vera",
        for_="hair removal, sensitive skin, fine hair, upper lip, legs and underarms",
        made="stainless steel, ABS, ceramic blades, natural wax, bamboo",
        parts="blade, handle, charging cable, comb, travel pouch, cleaning brush",
        does="catches short hairs in one pass, does not pull or nick, works wet and dry, runs for an hour on a charge, "
        "reaches tight corners, is quiet enough for the office",
    ),
)
