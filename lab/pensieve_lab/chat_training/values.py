"""Names, places, numbers, times and days that a conversation may tell, and which of them are held out.

Owns: the pools, how a value is drawn, and the held-out part: values whose checksum falls into one class of
five. All kinds use this rule except for closed lists, and no seed changes it. Most names are invented strings
or arbitrary words: a model copies only what it has seen copied, so it learns to copy anything only if
anything may occur.
Does not know: what the values stand for.
Called by `kinds` and `facts`.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from typing import Final

_VALUE_CLASSES: Final = 5
_NO_NAME_SHARE: Final = 0.3  # share of names in training that are letters or words
_LISTED_SHARE: Final = 0.4  # share of the rest that come from the list
_CONSONANT_SHARE: Final = 0.75  # share of invented names that begin with a consonant
_ODD_MINUTE_SHARE: Final = 0.3
_WEEKDAY_SHARE: Final = 0.5  # share of days
_DIGITS_SHARE: Final = 0.4  # share of counts in digits
_SMALL_COUNT_SHARE: Final = 0.6  # share of counts in digits that are small
_SMALL_COUNT: Final = 12
_MAX_COUNT: Final = 400
_NO_DAY_SHARE: Final = 0.15  # share of days in training that are invented names
_LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"


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
    "Wanda William Xenia Yara Yusuf Yuki Zara Zoe "
    "Abigail Albert Alexander Amy Andrew Angela Anthony Barbara Betty Brian Charles Charlotte Christine "
    "Daisy Dennis Donna Dorothy Douglas Edward Elizabeth Emily Eric Ethan Evelyn Francis Gloria Harold "
    "Harry Isabella Jacob Janet Jason Jeffrey Jennifer Jeremy Jessica John Jordan Joseph Joshua Joyce Judith "
    "Justin Karen Keith Kevin Kimberly Larry Lauren Linda Lisa Logan Louis Madison Margaret Mark Mary "
    "Matthew Megan Melissa Michael Michelle Nancy Natalie Nicholas Nicole Pamela Patrick Peter Philip Ralph "
    "Randy Raymond Richard Robert Roger Ronald Roy Russell Ryan Samantha Sandra Scott Sean Sharon Sophia "
    "Stephen Steven Susan Teresa Terry Timothy Tyler Vincent Virginia Walter Wayne Zachary "
    "Amber Bella Biscuit Blue Buddy Charlie Cherry Coco Cookie Dusty Echo Ginger Happy Honey Jasper Jazz "
    "Lucky Luna Max Midnight Misty Monty Olive Oreo Pebbles Pepper Rain River Rocky Rose Ruby Rusty Scout "
    "Shadow Silver Simba Sky Smokey Snow Sparky Spot Star Storm Sugar Sunny Teddy Tiger Toby Whiskers Willow"
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
_ONSETS: Final = _words(
    "b bl br c ch cr d dr f fl fr g gl gr h j k kl kr l m n p ph pl pr qu r s sc sh sl sp st t "
    "th tr v w wh y z"
)
_VOWELS: Final = _words("a e i o u a e i o u ai au ay ea ee ey ia ie io oo ou ue")
_CODAS: Final = ("", "", "", "", *_words("ck d g l ll m n nd ng nt p r rt s st t th x y z"))
_INNER_CODAS: Final = ("", "", "", "", "", *_words("l m n r s"))
_WEEKDAYS: Final = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
_MONTHS: Final = _words(
    "January February March April May June July August September October November December"
)
_COUNTS: Final = _words(
    "two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen twenty"
)
_CLOSED: Final = frozenset((*_WEEKDAYS, *_COUNTS, *map(str, range(2, 13))))
_PLACE_ENDINGS: Final = (*_words("ville ton field bridge haven stad burg ford mouth wick"), "")


def is_closed(value: str) -> bool:
    """Return whether a value belongs to a closed list, which training and tests share.

    These are weekdays, and numbers of people up to twenty in words or twelve in digits. A model that has not
    seen all of such a list takes the part that it has seen for the whole.
    """
    return value in _CLOSED


def is_held_out(value: str) -> bool:
    """Return whether training must never tell `value`."""
    return not is_closed(value) and zlib.crc32(value.encode()) % _VALUE_CLASSES == 0


def _invented(rng: random.Random, num_syllables: int) -> str:
    first = rng.choice(_ONSETS) if rng.random() < _CONSONANT_SHARE else ""
    parts = [first + rng.choice(_VOWELS)]
    for _ in range(num_syllables - 1):
        parts.append(rng.choice(_INNER_CODAS) + rng.choice(_ONSETS) + rng.choice(_VOWELS))
    name = ("".join(parts) + rng.choice(_CODAS)).capitalize()
    return name if len(name) > 1 else _invented(rng, num_syllables)  # "I" and "A" are words


def _a_name(rng: random.Random, listed: Sequence[str], text: str, endings: Sequence[str]) -> str:
    """Return a listed or an invented name; with a `text` also any word of it, or any letters."""
    if text and rng.random() < _NO_NAME_SHARE:
        letters = "".join(rng.choices(_LETTERS, k=rng.randint(3, 7)))
        words = [word for word in text.split() if word.isalpha() and word.islower() and len(word) > 4]
        return rng.choice([letters, *words]).capitalize()
    if rng.random() < _LISTED_SHARE:
        return rng.choice(listed)
    return _invented(rng, rng.randint(1, 3)) + rng.choice(endings)


def a_person(rng: random.Random, text: str) -> str:
    """Return a first name, or a string that could be one, which may be a word of `text`."""
    return _a_name(rng, _NAMES, text, ("",))


def a_place(rng: random.Random, text: str) -> str:
    """Return a city, or a string that could be one, which may be a word of `text`."""
    return _a_name(rng, _PLACES, text, _PLACE_ENDINGS)


def a_street(rng: random.Random, text: str) -> str:
    """Return a street named after a place."""
    return f"{a_place(rng, text)} {rng.choice(('Street', 'Road', 'Square', 'Avenue', 'Lane'))}"


def a_time(rng: random.Random, text: str) -> str:
    """Return a time of day, usually at a multiple of five minutes; `text` is ignored."""
    minute = rng.randrange(60) if rng.random() < _ODD_MINUTE_SHARE else 5 * rng.randrange(12)
    return f"{rng.randint(1, 12)}:{minute:02d} {rng.choice(('am', 'pm'))}"


def a_number(rng: random.Random, text: str) -> str:
    """Return a number of two to five digits, each length equally likely; `text` is ignored."""
    num_digits = rng.randint(2, 5)
    return str(rng.randrange(10 ** (num_digits - 1), 10**num_digits))


def a_day(rng: random.Random, text: str) -> str:
    """Return a weekday or a date; with a `text` sometimes an invented name, like that of a holiday."""
    if text and rng.random() < _NO_DAY_SHARE:
        return _invented(rng, rng.randint(1, 3))
    if rng.random() < _WEEKDAY_SHARE:
        return rng.choice(_WEEKDAYS)
    month, number = rng.choice(_MONTHS), rng.randint(1, 28)
    ordinal = f"{number}{_ordinal_ending(number)}"
    return rng.choice((f"{month} {ordinal}", f"the {ordinal} of {month}", f"{month} {number}"))


def _ordinal_ending(number: int) -> str:
    return "th" if number // 10 == 1 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")


def a_count(rng: random.Random, text: str) -> str:
    """Return a number of people, two or more, as a word or in digits; `text` is ignored."""
    if rng.random() >= _DIGITS_SHARE:
        return rng.choice(_COUNTS)
    return str(rng.randint(2, _SMALL_COUNT if rng.random() < _SMALL_COUNT_SHARE else _MAX_COUNT))
