// Slots that use the weights of the same expert.

#pragma once

typedef unsigned int u32;

struct ExpertTile {
    u32 expert;
    u32 first;  // position in the order of slots
    u32 n;      // 0: empty
};
