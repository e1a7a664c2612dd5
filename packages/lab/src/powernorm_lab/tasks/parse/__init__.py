"""The task of dependency parsing by transitions.

The transition system is arc-standard (Nivre 2004), with a stack of words that may still get
dependents, and a buffer of the following words. SHIFT moves a word from the buffer to the stack.
LEFT makes the topmost word of the stack the head of the word below it, RIGHT the other way round,
and the dependent is removed from the stack. A sentence of n words always takes 2 n transitions.
"""
