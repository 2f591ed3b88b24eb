"""Kinds of products: electronics."""

from __future__ import annotations

from functools import partial

from starpod.environments.webshop.catalogue.synthetic.kind import kind

electronics = partial(kind, "electronics")

AUDIO = "Electronics > Portable Audio & Video > "
HOME = "Electronics > Television & Video > "
PHOTO = "Electronics > Camera & Photo > "
COMPUTER = "Electronics > Computers & Accessories > "
PHONE = "Cell Phones & Accessories > "

KINDS = (
    electronics(
        "hdmi cables",
        "Electronics > Accessories & Supplies > Audio & Video Accessories > Cables & Interconnects > HDMI Cables",
        price=(6, 42),
        options={"cable_length": 0.5, "count": 0.15},
        nouns="HDMI cable, HDMI adapter cable, mini HDMI cable, braided HDMI cable, HDMI extension cable",
        is_="high speed, gold plated, plug play, heavy duty, high performance, ultra hd",
        has="aluminum alloy, gold connectors, nylon braid, ethernet channel, pure copper",
        for_="blu ray, gaming consoles, home theater, hd tv, monitors and projectors",
        made="oxygen-free copper, nylon, aluminum, PVC, zinc alloy",
        parts="connector, jacket, shielding, strain relief, plug",
        does="carries 4K at 60 Hz, supports high dynamic range, keeps interference out, bends without breaking, "
        "locks firmly into the port, passes audio return to the receiver",
    ),
    electronics(
        "bluetooth speakers",
        AUDIO + "Portable Speakers & Docks > Portable Bluetooth Speakers",
        price=(15, 160),
        options={"color": 0.5},
        nouns="bluetooth speaker, portable speaker, shower speaker, party speaker, mini wireless speaker, "
        "outdoor speaker",
        is_="water proof, hands free, easy carry, long lasting, high definition, dust proof",
        has="stereo sound, usb port, built in microphone, led lights, wireless bluetooth",
        for_="pool party, home office, outdoor camping, shower use, road trips",
        made="rugged rubber, woven fabric, ABS, aluminum grille, silicone",
        parts="driver, passive radiator, battery, carrying strap, volume dial, subwoofer",
        does="plays twenty hours on a charge, pairs in two seconds, fills the whole patio, floats face up, "
        "answers calls at the press of a button, links with a second unit for wide stereo",
    ),
    electronics(
        "headphones",
        AUDIO + "Headphones > Over-Ear Headphones",
        price=(12, 260),
        options={"color": 0.5},
        nouns="over ear headphones, wireless earbuds, gaming headset, kids headphones, noise cancelling headphones, "
        "sleep headphones",
        is_="noise cancelling, hands free, light weight, fast charging, high definition, water resistant, tangle free",
        has="stereo sound, wireless bluetooth, carrying case, memory foam, usb port, built in microphone",
        for_="gym workout, home office, long flights, school lessons, gaming consoles",
        made="protein leather, memory foam, soft silicone, stainless steel, breathable mesh",
        parts="ear cushion, headband, charging case, boom microphone, touch control, cable",
        does="blocks the noise of trains and offices, folds flat into its case, stays in place on a run, "
        "charges fully in an hour, renders deep bass and clear vocals, switches between two devices",
    ),
    electronics(
        "home theater systems",
        HOME + "Home Theater Systems",
        price=(35, 980),
        options={"style": 0.15},
        nouns="soundbar, home theater system, surround sound system, subwoofer, sound bar with subwoofer, "
        "wall speaker pair",
        is_="wall mounted, plug play, high power, high definition, ultra slim",
        has="stereo sound, wireless bluetooth, remote control, hdmi port, power amplifier, optical input",
        for_="home theater, tv and movies, living room, gaming consoles, small apartments",
        made="MDF, steel mesh, woven cone, birch plywood, aluminum",
        parts="subwoofer, tweeter, remote, satellite speaker, bracket, power cord",
        does="makes dialogue easy to follow, shakes the couch when it should, sets up with a single cable, "
        "remembers a sound mode for each input, hides below the screen",
    ),
    electronics(
        "digital cameras",
        PHOTO + "Digital Cameras > Point & Shoot Digital Cameras",
        price=(45, 1480),
        options={"color": 0.25, "bundle": 0.15},
        nouns="digital camera, compact camera, vlogging camera, instant camera, kids camera, mirrorless camera",
        is_="high resolution, easy carry, high speed, water proof, batteries included, ultra hd",
        has="optical zoom, memory card, flip screen, wifi transfer, image stabilization",
        for_="beginners and teens, travel photography, video blogging, family trips, underwater photography",
        made="magnesium alloy, optical glass, ABS, leatherette",
        parts="lens, sensor, lithium battery, viewfinder, wrist strap, charger, tripod mount",
        does="shoots sharp pictures in low light, records steady video while walking, tracks faces on its own, "
        "sends pictures to a phone, starts up in half a second, zooms in without noise",
    ),
    electronics(
        "projectors",
        HOME + "Video Projectors",
        price=(55, 1250),
        options={"color": 0.15, "bundle": 0.15},
        nouns="mini projector, video projector, portable projector, outdoor movie projector, laser projector",
        is_="high definition, ultra hd, easy carry, high performance, energy efficient, low noise",
        has="stereo speakers, carrying case, remote control, wifi mirroring, keystone correction, hdmi port",
        for_="home theater, outdoor movies, office presentations, bedroom ceiling, gaming consoles",
        made="ABS, optical glass, aluminum fins, diffuse optics",
        parts="lamp, lens, remote, fan, tripod, dust filter, power supply",
        does="throws a 120 inch picture on any wall, mirrors a phone without cables, stays quiet during movies, "
        "keeps colors true in dim rooms, corrects a slanted image by itself",
    ),
    electronics(
        "screen protectors",
        PHONE + "Accessories > Maintenance, Upkeep & Repairs > Screen Protectors",
        price=(5, 24),
        options={"phone": 0.35, "count": 0.3},
        nouns="screen protector, privacy screen protector, tempered glass screen protector, camera lens protector, "
        "matte screen film",
        is_="easy install, high definition, case friendly, bubble free, ultra clear, fingerprint resistant",
        has="tempered glass, glass screen, alignment frame, oleophobic coating, cleaning kit",
        for_="cell phone, tablet screen, smart watch, mobile gaming, daily protection",
        made="tempered glass, hydrogel, ceramic film, PET film",
        parts="alignment frame, wipe, dust sticker, film, applicator card",
        does="takes the hit so that the display does not, keeps touch as quick as before, "
        "hides the screen from the side, "
        "goes on without bubbles, survives keys in the same pocket",
    ),
    electronics(
        "tablets",
        COMPUTER + "Computers & Tablets > Tablets",
        price=(59, 890),
        options={"capacity": 0.4, "color": 0.4},
        nouns="android tablet, kids tablet, drawing tablet, tablet with keyboard, e-reader tablet",
        is_="high performance, long lasting, light weight, fast charging, kid friendly, quad core",
        has="touch screen, dual cameras, wifi bluetooth, stylus pen, high definition display",
        for_="school lessons, video calls, reading books, digital drawing, travel and work",
        made="aluminum alloy, tempered glass, silicone, recycled plastic",
        parts="display, stylus, charger, stand, battery, keyboard cover, speaker",
        does="runs a full day between charges, opens apps without waiting, sets limits for screen time, "
        "splits the screen for two tasks, senses the pressure of the pen",
    ),
    electronics(
        "wearable technology",
        "Electronics > Wearable Technology > Smartwatches",
        price=(18, 320),
        options={"color": 0.55, "band_size": 0.3},
        nouns="smart watch, fitness tracker, watch band, kids smart watch, running watch, health ring",
        is_="water resistant, quick release, long lasting, easy install, hands free, dust proof",
        has="heart rate monitor, stainless steel, touch screen, sleep tracking, gps tracking",
        for_="men and women, gym workout, outdoor sports, daily wear, health monitoring",
        made="fluoroelastomer, stainless steel, milanese mesh, leather, ceramic",
        parts="band, clasp, dial, charging dock, crown, spring bar",
        does="counts steps and laps, shows calls and messages, tracks sleep without being felt, "
        "lasts ten days on a charge, "
        "changes bands in seconds, warns of an unusual pulse",
    ),
    electronics(
        "power protection",
        "Electronics > Power Accessories > Surge Protectors",
        price=(12, 190),
        options={"color": 0.25, "cable_length": 0.25},
        nouns="surge protector, power strip, uninterruptible power supply, outlet extender, extension cord with surge "
        "protection, travel power strip",
        is_="fast charging, wall mounted, heavy duty, space saving, fire resistant",
        has="usb port, overload protection, flat plug, power cord, aluminum alloy, night light",
        for_="home office, dorm room, garage workshop, travel and cruise, entertainment center",
        made="fire-retardant housing, copper wire, aluminum, polycarbonate",
        parts="outlet, switch, cord, indicator light, circuit breaker, mounting bracket",
        does="absorbs spikes before they reach your devices, leaves room for bulky plugs, charges six devices at once, "
        "cuts off when overloaded, keeps a router alive in an outage",
    ),
    electronics(
        "video surveillance",
        "Electronics > Security & Surveillance > Surveillance Video Equipment > Surveillance Cameras",
        price=(20, 420),
        options={"count": 0.3},
        nouns="security camera, indoor camera, doorbell camera, baby monitor, outdoor security camera, spy camera",
        is_="motion detection, plug play, easy install, high definition, weather proof, batteries included",
        has="night vision, two way audio, solar panel, memory card, wide angle lens",
        for_="home security, baby and pets, front door, garage and driveway, small business",
        made="weatherproof ABS, aluminum, polycarbonate dome",
        parts="bracket, antenna, lens, siren, base station, power adapter",
        does="sends an alert when someone is near, sees in full color at night, stores clips without a subscription, "
        "turns to follow movement, connects within minutes, holds out in rain and frost",
    ),
    electronics(
        "mounts",
        HOME + "Accessories > TV Mounts, Stands & Turntables",
        price=(16, 140),
        options={"dimension": 0.25, "color": 0.1},
        nouns="tv wall mount, monitor arm, projector mount, speaker stands, tablet holder, camera clamp mount",
        is_="heavy duty, easy install, wall mounted, height adjustable, space saving, quick release",
        has="carbon steel, aluminum alloy, cable management, ball head, full motion arm",
        for_="flat screens, home office, living room, standing desk, stage and studio",
        made="cold-rolled steel, aluminum, carbon steel, silicone pads",
        parts="arm, plate, hardware kit, bubble level, clamp, joint, cover",
        does="holds four times its rated weight, swivels toward any seat, folds nearly flat, "
        "keeps cables out of sight, "
        "fits common hole patterns, needs one person and half an hour",
    ),
)
