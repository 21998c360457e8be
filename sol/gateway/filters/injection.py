"""Signs of prompt injection: expressions in English and Chinese, each with how much it says.

The signs of one sentence add up as independent evidence does: 1 - (1-a)(1-b)…. The list knows the common wordings and
nothing else; it is a first line, and what works where there is no classifier model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Sign:
    name: str
    weight: float
    """How sure a sentence with this sign alone is an attack, from 0 to 1."""
    pattern: str
    """Without regard to case."""


_FEW_WORDS: Final = r"(?:[\w']{1,20}\s+){0,3}"
_THESE: Final = (
    r"(?:above|before|earlier|existing|foregoing|former|initial|original|preceding|previous|prior|system|your)\s+"
)
_ORDERS: Final = (
    r"(?:command|constraint|context|direction|directive|guardrail|guideline|instruction|message|prompt|restriction|"
    r"rule|safety)s?\b"
)
_ZH_IGNORE: Final = "(?:忽略|无视|忘记|忘掉|抛开|不要理会|不用管|不要遵守|绕过|跳过)"
_NEAR: Final = r"[^。!?\n]{0,8}"
_ZH_THESE: Final = "(?:之前|以前|先前|前面|上面|以上|上述|此前|原来|原有|既有|系统|你的|所有|一切|任何)"
_ZH_ORDERS: Final = "(?:指令|指示|命令|规则|提示|设定|设置|限制|约束|要求|规定|对话|上下文)"

SIGNS: Final = (
    Sign(
        "ignore_instructions",
        0.9,
        r"\b(?:bypass|disregard|discard|forget|ignore|override|overlook|skip)\s+"
        + _FEW_WORDS
        + _THESE
        + _FEW_WORDS
        + _ORDERS,
    ),
    Sign(
        "ignore_everything",
        0.7,
        r"\b(?:disregard|forget|ignore)\s+(?:everything|all|anything)\s+(?:above|before|you)\b",
    ),
    Sign(
        "reveal_prompt",
        0.8,
        r"\b(?:display|dump|expose|leak|output|print|recite|repeat|reveal|show|tell)\s+(?:me\s+|us\s+)?"
        r"(?:[\w']{1,20}\s+){0,2}(?:hidden|initial|internal|original|secret|system|your)\s+(?:[\w']{1,20}\s+){0,2}"
        r"(?:instructions?|prompts?)\b",
    ),
    Sign(
        "new_role",
        0.5,
        r"\byou\s+are\s+(?:no\s+longer|now)\s+(?:a\b|an\b|in\b|bound\b|the\b|DAN\b|[\w']{1,20}\s+mode\b)",
    ),
    Sign(
        "unrestricted_mode",
        0.7,
        r"\b(?:DAN|debug|developer|god|jailbreak|jailbroken|root|sudo|unfiltered|unrestricted)\s+mode\b|"
        r"\bdo\s+anything\s+now\b",
    ),
    Sign(
        "without_rules",
        0.6,
        r"\b(?:act|answer|behave|pretend|respond|roleplay)\b(?:\s+[\w',]{1,20}){0,6}\s+(?:no|without)\s+(?:any\s+)?"
        r"(?:[\w']{1,20}\s+)?(?:censorship|ethics|filters?|guardrails|guidelines|limits|restrictions|rules)\b",
    ),
    Sign(
        "new_instructions",
        0.6,
        r"\b(?:here\s+are\s+your|your|these\s+are)\s+(?:new|real|updated|true)\s+(?:instructions|orders|task)\b",
    ),
    Sign(
        "chat_markup",
        0.9,
        r"<\|(?:im_start|im_end|system|user|assistant|start_header_id|end_header_id|eot_id|endoftext)\|>|<<SYS>>|"
        r"\[/?INST\]|</?(?:system|system_prompt)>",
    ),
    Sign("system_heading", 0.6, r"(?m)^\s{0,8}#{0,6}\s{0,2}(?:new\s+)?system\s*(?:message|prompt)?\s*:"),
    Sign("zh_ignore", 0.9, _ZH_IGNORE + _NEAR + _ZH_THESE + _NEAR + _ZH_ORDERS),
    Sign(
        "zh_reveal",
        0.8,
        "(?:输出|打印|显示|告诉我|复述|重复|泄露|透露|展示|说出)"
        + _NEAR
        + r"(?:系统|初始|原始|隐藏|内部|完整)[^。!?\n]{0,4}(?:提示词|提示|指令|设定|prompt)",
    ),
    Sign("zh_new_role", 0.5, r"(?:从现在起|从现在开始|现在),?\s*你(?:就是|是|将扮演|扮演|不再是|不再受)"),
    Sign(
        "zh_without_rules",
        0.7,
        r"(?:没有|不受|解除|取消|突破)[^。!?\n]{0,6}(?:限制|约束|审查|道德|规则)[^。!?\n]{0,6}(?:回答|模式|扮演|AI|助手)",
    ),
    Sign("zh_mode", 0.7, "(?:开发者|上帝|越狱|无限制|调试|管理员)模式"),
)


def combined(weights: list[float]) -> float:
    doubt = 1.0
    for weight in weights:
        doubt *= 1 - weight
    return 1 - doubt
