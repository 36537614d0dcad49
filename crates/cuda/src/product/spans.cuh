// Slots that meet the weights of the same expert.

#pragma once

typedef unsigned int u32;

struct Span {
    u32 expert;
    u32 first;  // place in the order of slots
    u32 n;      // 0: nothing to do
};
