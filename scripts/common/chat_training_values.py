"""Names, places, numbers and times that a conversation may tell, and which of them training never sees.

Owns: the pools, how a value is drawn, and the held-out part: the values whose checksum falls into one class
of five. It is one rule for all kinds, and no seed changes it. Most names are invented, which keeps a model
from learning a list where it should copy.
Does not know: what the values stand for.
Called by: `chat_training_facts`.
"""

from __future__ import annotations

import random
import zlib
from typing import Final

_VALUE_CLASSES: Final = 5
_INVENTED_SHARE: Final = 0.6


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_NAMES: Final = _words(
    "Ada Adam Aisha Alan Alice Amara Amir Ana Anders Andrea Anika Anton Arjun Astrid Aylin Beatrice Ben "
    "Bianca Boris Bruno Carla Carlos Cecilia Chen Chloe Clara Colin Daniel Daria David Deniz Diana Diego "
    "Dmitri Edith Elena Eli Elif Emil Emma Enzo Erik Esther Eva Fatima Felix Fiona Florian Frank Freya "
    "Gabriel George Grace Greta Hana Hannah Hassan Heidi Helena Henry Hugo Ibrahim Ida Igor Ines Ingrid "
    "Irene Isaac Ivan Jack Jamal James Jana Jasmine Joanna Joel Jonas Julia Kai Karim Kate Kenji Kira Klara "
    "Lars Laura Layla Lena Leo Liam Lina Linus Lucas Lucia Luis Lydia Maria Marco Martha Martin Maya Mei "
    "Mia Milan Mina Miriam Mohammed Nadia Naomi Nathan Nico Nina Noah Nora Oliver Olga Omar Oscar Otto Paul "
    "Pedro Petra Priya Quentin Rachel Rahul Rafael Rebecca Rita Robin Rosa Ruth Samir Samuel Sara Sergei "
    "Silvia Simon Sofia Stella Sven Tamara Tariq Theo Thomas Tina Tom Ursula Valentina Vera Victor Viktor "
    "Wanda William Xenia Yara Yusuf Yuki Zara Zoe"
)
_PLACES: Final = _words(
    "Accra Ankara Antwerp Athens Austin Bangkok Barcelona Basel Beirut Belfast Bergen Berlin Bilbao Bologna "
    "Bordeaux Boston Bremen Brighton Brisbane Bristol Brussels Budapest Cairo Cardiff Casablanca Chennai "
    "Chicago Cologne Copenhagen Cordoba Cork Dakar Dallas Delhi Denver Dresden Dublin Edinburgh Florence "
    "Geneva Genoa Ghent Glasgow Granada Hamburg Hanoi Havana Helsinki Houston Istanbul Jakarta Kigali "
    "Krakow Kyoto Lagos Leeds Leipzig Lima Lisbon Liverpool London Lyon Madrid Malmo Manila Marseille "
    "Melbourne Miami Milan Montreal Mumbai Munich Nairobi Nantes Naples Odense Osaka Oslo Oxford Palermo "
    "Paris Perth Porto Prague Quito Reykjavik Riga Rome Rotterdam Salzburg Santiago Seattle Seoul Seville "
    "Sofia Stockholm Sydney Tallinn Tampere Tokyo Toronto Toulouse Trieste Tunis Turin Utrecht Valencia "
    "Vancouver Verona Vienna Vilnius Warsaw York Zagreb Zurich"
)
_ONSETS: Final = _words("b br c ch d dr f fl g gr h j k kl l m n p pr r s sh st t tr v w y z")
_VOWELS: Final = _words("a e i o u ai ea ia io ou")
_CODAS: Final = ("", "", "", "l", "m", "n", "r", "s", "th", "x")
_PLACE_ENDINGS: Final = _words("ville ton field bridge haven stad burg ford mouth wick")


def is_held_out(value: str) -> bool:
    """Whether training must never tell `value`."""
    return zlib.crc32(value.encode()) % _VALUE_CLASSES == 0


def _invented(rng: random.Random, num_syllables: int) -> str:
    parts = [rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(num_syllables)]
    return ("".join(parts) + rng.choice(_CODAS)).capitalize()


def a_person(rng: random.Random) -> str:
    """A first name, or what could be one."""
    return _invented(rng, rng.randint(1, 3)) if rng.random() < _INVENTED_SHARE else rng.choice(_NAMES)


def a_place(rng: random.Random) -> str:
    """A city, or what could be one."""
    if rng.random() < _INVENTED_SHARE:
        return _invented(rng, rng.randint(1, 2)) + rng.choice(_PLACE_ENDINGS)
    return rng.choice(_PLACES)


def a_street(rng: random.Random) -> str:
    """A street called after a place."""
    return f"{a_place(rng)} {rng.choice(('Street', 'Road', 'Square', 'Avenue'))}"


def a_time(rng: random.Random) -> str:
    """A time of day, in steps of five minutes."""
    return f"{rng.randint(1, 12)}:{5 * rng.randrange(12):02d} {rng.choice(('am', 'pm'))}"


def a_number(rng: random.Random) -> str:
    """A number of two to four digits."""
    return str(rng.randrange(10 ** rng.randint(1, 3), 10**4))
