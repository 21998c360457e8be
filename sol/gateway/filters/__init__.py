"""What requests and answers may say: limits of size, words, expressions, personal data, prompt injection.

config       the section of gateway.yaml
normalise    texts in one form, and the way back       expressions, matcher   RE2 and Aho-Corasick, all rules at once
pii, injection, sentences    built-in rules            classifier, presidio, detectors   what needs a model
fields, rules, filters       requests                  window, output                    answers and streams
decisions    what was found, and counts                stage                             the pipeline's stage
"""
