"""Personal data and secrets of known forms: an expression for each, and the checksum that its issuer puts in.

A checksum is what keeps order numbers from being taken for cards. Matches are bounded, so that all of them can be found
in a stream. Names and addresses have no form; Presidio finds those (`sol.gateway.filters.presidio`).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

Validator = Callable[[str, str], int]
"""Of what an expression matched, and the character after it: how many of its first characters are such a thing; 0:
none."""


@dataclass(frozen=True, slots=True)
class EntityPattern:
    pattern: str
    validator: Validator | None = None


def luhn(digits: str) -> bool:
    """ISO/IEC 7812-1, annex B."""
    doubled = [int(d) for d in digits[-2::-2]]
    return (sum(map(int, digits[-1::-2])) + sum(d * 2 - 9 * (d > 4) for d in doubled)) % 10 == 0


_DOUBLED: Final = (0, 2, 4, 6, 8, 1, 3, 5, 7, 9)


def _card(text: str, following: str) -> int:
    """Groups that follow the number may have matched with it, so it may end with any group. One pass tries all ends: a
    text of nothing but digits and spaces has such a match at every one of them."""
    end = count = 0
    sums = [0, 0]  # with the digits at even places doubled, and with those at odd ones
    for place, character in enumerate(text):
        if character.isdigit():
            digit = int(character)
            sums[count % 2] += _DOUBLED[digit]
            sums[1 - count % 2] += digit
            count += 1
            if count >= 13 and not text[place + 1 : place + 2].isdigit() and sums[count % 2] % 10 == 0:
                end = place + 1
    return end if len(set(text[:end]) - {" ", "-"}) > 1 else 0


_COUNTRIES_BY_IBAN_LENGTH: Final = {
    15: "NO",
    16: "BE",
    18: "DK FI FO GL NL",
    19: "MK SI",
    20: "AT BA EE KZ LT LU XK",
    21: "CH HR LI LV",
    22: "BG BH CR DE GB GE IE ME RS VA",
    23: "AE GI IL IQ TL",
    24: "AD CZ ES MD PK RO SA SE SK TN VG",
    25: "LY PT ST",
    26: "IS TR",
    27: "FR GR IT MC MR SM",
    28: "AL AZ BY CY DO GT HU LB PL SV",
    29: "BR EG PS QA UA",
    30: "JO KW MU",
    31: "MT SC",
    32: "LC",
}
_IBAN_LENGTHS: Final = {
    country: length for length, countries in _COUNTRIES_BY_IBAN_LENGTH.items() for country in countries.split()
}
"""By country, from SWIFT's IBAN registry."""


def _iban(text: str, following: str) -> int:
    """ISO 13616. The words after it look like more groups; its country says how long it is."""
    length = _IBAN_LENGTHS.get(text[:2].upper())
    characters = [(index, c) for index, c in enumerate(text) if c != " "]
    if length is None or len(characters) < length:
        return 0
    end = characters[length - 1][0] + 1
    after = text[end : end + 1] or following
    if after.isascii() and after.isalnum():
        return 0
    number = "".join(c for _, c in characters[:length]).upper()
    return end if int("".join(str(int(c, 36)) for c in number[4:] + number[:4])) % 97 == 1 else 0


def _chinese_id(text: str, following: str) -> int:
    """GB 11643-1999; its last character is ISO 7064 MOD 11-2 of the others."""
    total = sum(int(digit) << (17 - place) for place, digit in enumerate(text[:17]))
    return len(text) if "10X98765432"[total % 11] == text[17].upper() else 0


def _phone(text: str, following: str) -> int:
    """E.164 numbers have at most 15 digits; fewer than 8 are too few to be sure."""
    return len(text) if 8 <= sum(map(str.isdigit, text)) <= 15 else 0


def _ip_address(text: str, following: str) -> int:
    """Written so loosely that a name of C++ may look like it, an IPv6 address must have three groups and a digit."""
    try:
        address = ipaddress.ip_address(text.rstrip(":") if not text.endswith("::") else text)
    except ValueError:
        return 0
    sure = address.version == 4 or (sum(map(bool, text.split(":"))) >= 3 and any(map(str.isdigit, text)))
    return len(text.rstrip(":")) if sure else 0


_OCTET: Final = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_BASE64URL: Final = "[A-Za-z0-9_-]"

ENTITIES: Final[dict[str, tuple[EntityPattern, ...]]] = {
    "email": (EntityPattern(r"\b[A-Za-z0-9][A-Za-z0-9._%+'-]{0,63}@(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24}\b"),),
    "phone": (
        EntityPattern(r"\+\d{1,3}(?:[ .()-]{0,2}\d){6,13}\b", _phone),
        EntityPattern(r"\b(?:86[ -]?)?1[3-9]\d[ -]?\d{4}[ -]?\d{4}\b"),  # mainland China, mobile
        EntityPattern(r"\b0\d{2,3}-\d{7,8}\b"),  # mainland China, by area code
        EntityPattern(r"(?:\(\d{3}\) ?|\b\d{3}[ .-])\d{3}[ .-]\d{4}\b"),  # North America
    ),
    "card": (EntityPattern(r"\b[2-6](?:[ -]?\d){12,18}\b", _card),),
    "iban": (EntityPattern(r"(?i)\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]){11,30}", _iban),),
    "cn_id": (
        EntityPattern(
            r"\b[1-9]\d{5}(?:18|19|20)\d{2}(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])\d{3}[\dXx]\b", _chinese_id
        ),
    ),
    "ip": (
        EntityPattern(rf"\b(?:{_OCTET}\.){{3}}{_OCTET}\b", _ip_address),
        EntityPattern(r"(?i)\b[0-9a-f]{1,4}(?::[0-9a-f]{0,4}){2,7}", _ip_address),
    ),
    "secret": (
        EntityPattern(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"),  # AWS
        EntityPattern(r"\bgh[pousr]_[A-Za-z0-9]{36,255}\b"),  # GitHub
        EntityPattern(r"\bgithub_pat_[A-Za-z0-9_]{22,255}\b"),
        EntityPattern(rf"\bglpat-{_BASE64URL}{{20,255}}"),  # GitLab
        EntityPattern(rf"\bsk-{_BASE64URL}{{20,255}}"),  # OpenAI, Anthropic and those that copy them
        EntityPattern(r"\bhf_[A-Za-z0-9]{30,255}\b"),  # Hugging Face
        EntityPattern(rf"\bAIza{_BASE64URL}{{35}}"),  # Google
        EntityPattern(r"\bxox[abeoprs]-[A-Za-z0-9-]{10,255}"),  # Slack
        EntityPattern(r"\b[rs]k_(?:live|test)_[A-Za-z0-9]{16,255}\b"),  # Stripe
        EntityPattern(rf"\beyJ{_BASE64URL}{{8,1000}}\.eyJ{_BASE64URL}{{8,1000}}\.{_BASE64URL}{{8,1000}}"),  # JWT
        EntityPattern(
            r"-----BEGIN (?:[A-Z]{1,10} ){0,3}PRIVATE KEY-----"
            + r"[A-Za-z0-9+/=\s]{0,1000}" * 4
            + r"(?:-----END (?:[A-Z]{1,10} ){0,3}PRIVATE KEY-----)?"
        ),
    ),
}
