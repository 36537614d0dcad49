// Groups of codes in registers, and their conversion to MMA operands. decode.rs describes the
// method.

#pragma once

#include "prologue_epilogue.cuh"

template <u32 I>
__device__ inline u32 word(const uint4& v) {
    return I == 0 ? v.x : I == 1 ? v.y : I == 2 ? v.z : v.w;
}

// Returns the words from `first`, 0 or 2, on as the first two.
__device__ inline uint4 words_from(const uint4& v, u32 first) { return {first ? v.z : v.x, first ? v.w : v.y, v.z, v.w}; }

// The data of a lane in group g of a block of `dims`: its 16 rows (tokens of K, dims of V) of four
// values each. An MMA takes rows I, I + 4, I + 8 and I + 12. `from(row)` returns the rows from
// `row`, 0 or 2, on, in the positions of the first ones.
template <u32 TYPE>
struct Group;

template <>
struct Group<Q8_0> {
    uint4 rows[4];
    __device__ void load(const u8* planes, u32, u32 g) {
        for (int i = 0; i < 4; i++) rows[i] = __ldg((const uint4*)(planes + Q8_0_GROUP * g) + i);
    }
    __device__ Group from(u32 row) const {
        return {{words_from(rows[0], row), words_from(rows[1], row), words_from(rows[2], row), words_from(rows[3], row)}};
    }
    template <u32 I>
    __device__ Codes codes(const Book&) const {
        return {{word<I % 4>(rows[I / 4]), word<I % 4>(rows[I / 4 + 2])}};
    }
};

template <class G>
struct Nibbles {
    uint4 rows[2];
    __device__ void load(const u8* planes, u32, u32 g) {
        for (int i = 0; i < 2; i++) rows[i] = __ldg((const uint4*)(planes + NIBBLES_GROUP * g) + i);
    }
    __device__ G from(u32 row) const { return {{{words_from(rows[0], row), words_from(rows[1], row)}}}; }
};

template <>
struct Group<Q4_0> : Nibbles<Group<Q4_0>> {
    template <u32 I>
    __device__ Codes codes(const Book&) const {
        u32 pairs = word<I % 4>(rows[I / 4]);
        return {{pairs & 0x0f0f0f0f, pairs >> 4 & 0x0f0f0f0f}};
    }
};

template <>
struct Group<TURBO4> : Nibbles<Group<TURBO4>> {
    template <u32 I>
    __device__ Codes codes(const Book& book) const {
        return sixteen_levels(book, word<I % 4>(rows[I / 4]));
    }
};

template <>
struct Group<TURBO2> {
    uint4 low;
    __device__ void load(const u8* planes, u32, u32 g) { low = __ldg((const uint4*)(planes + TURBO2_GROUP * g)); }
    // Returns the words of another lane.
    __device__ Group of_lane(u32 lane) const {
        return {{__shfl_sync(~0u, low.x, lane), __shfl_sync(~0u, low.y, lane), __shfl_sync(~0u, low.z, lane),
                 __shfl_sync(~0u, low.w, lane)}};
    }
    // Returns the values shifted by one to the right: the first ones are the last of `left`.
    __device__ Group after(const Group& left) const {
        return {{low.x << 8 | left.low.x >> 24, low.y << 8 | left.low.y >> 24, low.z << 8 | left.low.z >> 24,
                 low.w << 8 | left.low.w >> 24}};
    }
    // Returns the rows shifted down by one, the last one first.
    __device__ Group rows_shifted() const {
        return {{(low.w & 0x3f3f3f3f) << 2 | (low.w >> 6 & 0x03030303), low.x, low.y, low.z}};
    }
    __device__ Group from(u32 row) const { return {words_from(low, row)}; }
    // Returns the indices of rows I (low nibble) and I + 8 (high nibble) of four values.
    template <u32 I>
    __device__ u32 indices() const {
        return word<I % 4>(low) >> (I / 4 * 2) & 0x33333333;
    }
    template <u32 I>
    __device__ Codes codes(const Book& book) const {
        return four_levels(book, indices<I>());
    }
};

// Exchanges the bits of MASK with those SHIFT to the left of them.
template <u32 SHIFT, u32 MASK>
__device__ inline u32 exchanged(u32 x) {
    u32 differ = logic<0x28>(x, x >> SHIFT, MASK);  // (a ^ b) & c
    return x ^ differ * (1 + (1 << SHIFT));
}

template <>
struct Group<TURBO3> {
    Group<TURBO2> two;
    uint2 high;
    __device__ void load(const u8* planes, u32 dims, u32 g) {
        two.load(planes, dims, g);
        high = __ldg((const uint2*)(planes + high_planes(dims) + HIGH_GROUP * g));
    }
    __device__ Group of_lane(u32 lane) const {
        return {two.of_lane(lane), {__shfl_sync(~0u, high.x, lane), __shfl_sync(~0u, high.y, lane)}};
    }
    __device__ Group after(const Group& left) const {
        return {two.after(left.two),
                {(high.x & 0x77777777) << 1 | (left.high.x >> 3 & 0x11111111),
                 (high.y & 0x77777777) << 1 | (left.high.y >> 3 & 0x11111111)}};
    }
    __device__ Group rows_shifted() const {
        return {two.rows_shifted(), {high.x << 4 | high.y >> 28, high.y << 4 | high.x >> 28}};
    }
    __device__ Group from(u32 row) const { return {two.from(row), {high.x >> 4 * row, high.y >> 4 * row}}; }
    // Returns the high bits in the bit positions of indices, of rows I % 4 + 4 (bit 2 of a nibble)
    // and I % 4 (bit 0), all else 0. Of the five digits of a bit's number in a word, upper ones
    // first, these are digits 2 and 1 of its row (i), its half of the rows (h) and its value (v).
    // All eight I of a group share the words: 21 integer instructions, which are the bottleneck.
    template <u32 I>
    __device__ u32 high_bits() const {
        u32 rows = I % 2 == 0 ? choose(0x0f0f0f0f, high.x, high.y << 4)
                              : choose(0x0f0f0f0f, high.x >> 4, high.y);  // i i h v v
        u32 halfway = exchanged<14, 0x0000cccc>(rows);                    // v i h i v
        u32 values = exchanged<7, 0x00aa00aa>(halfway);                   // v v h i i
        return choose(0x55555555, values >> (I / 2 % 2), 0);
    }
    template <u32 I>
    __device__ u32 indices() const {
        u32 bits = high_bits<I % 4>();
        return I < 4 ? choose(0x33333333, word<I % 4>(two.low), bits << 2)
                     : choose(0x33333333, word<I % 4>(two.low) >> 2, bits);
    }
    template <u32 I>
    __device__ Codes codes(const Book& book) const {
        return eight_levels(book, indices<I>());
    }
};

// A group of a trellis type, and its predecessors in the code sequence: 16 dims earlier, or, before
// the first 16 of a block, the last ones, one dim to the left.
template <u32 TYPE>
struct TrellisGroup {
    static constexpr u32 MEMORY = TYPE == TURBO2T ? 2 : 1;
    Group<layout_of(TYPE)> own, before[MEMORY];

    __device__ void load(const u8* planes, u32 dims, u32 g) { own.load(planes, dims, g); }
    // For keys: `last` is the preceding group.
    __device__ void set_predecessor(const TrellisGroup& last) {
        before[0] = last.own;
        if constexpr (MEMORY == 2) before[1] = last.before[0];
    }
    // For keys: loads the predecessor of the first group of a lane, as if it were one more group.
    __device__ void load_predecessor(const u8* planes, u32 dims, u32 lane) {
        u32 left = lane / 4 * 4 + (lane + 3) % 4;
        auto column = [&](Group<layout_of(TYPE)>& to, u32 back) {
            to.load(planes, dims, dims / 4 - 4 * back + lane % 4);
            to = to.after(to.of_lane(left));
        };
        column(own, 1);
        if constexpr (MEMORY == 2) column(before[0], 2);
    }
    // For values, whose 16 dims are four lanes: this lane has dims from 16 `at` on of a block of
    // `dims`.
    __device__ void set_predecessor_lanes(u32 at, u32 dims, u32 lane) {
#pragma unroll
        for (u32 m = 0; m < MEMORY; m++) {
            bool wraps = at <= m;
            Group<layout_of(TYPE)> other = own.of_lane((lane + (wraps ? dims / 16 : 0) * 4 - (m + 1) * 4) % 32);
            before[m] = wraps ? other.rows_shifted() : other;
        }
    }
    __device__ Group<TYPE> from(u32 row) const {
        Group<TYPE> group;
        group.own = own.from(row);
        for (u32 m = 0; m < MEMORY; m++) group.before[m] = before[m].from(row);
        return group;
    }
    template <u32 I>
    __device__ Windows at() const {
        return windows<TYPE>(own.template indices<I>(), before[0].template indices<I>(), before[MEMORY - 1].template indices<I>());
    }
};
template <>
struct Group<TURBO2T> : TrellisGroup<TURBO2T> {};
template <>
struct Group<TURBO3T> : TrellisGroup<TURBO3T> {};

// Levels of the trellis types as f16, one copy per lane, so that look-ups of a warp have no bank
// conflicts.
struct LevelTable {
    static constexpr u32 LEVELS = is_trellis(K_TYPE) || is_trellis(V_TYPE) ? sizeof(TRELLIS[0]) : 1;
    u32 levels[LEVELS][32];

    __device__ void fill(u32 type, u32 thread, u32 threads) {
        for (u32 i = thread; i < LEVELS * 32; i += threads) {
            u32 level = i / 32, byte = TRELLIS[type - TURBO2T][level / 4] >> (8 * (level % 4)) & 255;
            levels[level][i % 32] = to_half((float)byte - 128.0f);
        }
    }
};

// Returns levels of rows I and I + 8 as f16, in the order (row I, values 0 and 1), (row I + 8, 0
// and 1), (row I, 2 and 3), (row I + 8, 2 and 3). A byte dot product selects one of four windows
// and computes the address of the lane's level.
template <u32 I, u32 TYPE>
__device__ inline void level_fragment(const Group<TYPE>& group, const LevelTable& table, u32 lane, u32 a[4]) {
    Windows at = group.template at<I>();
    u32 first = shared_address(&table.levels[0][lane]);
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        u32 pair[2];
#pragma unroll
        for (u32 e = 0; e < 2; e++) {
            u32 value = i / 2 * 2 + e;
            // The base address is the accumulator of the dot product, which saves an addition.
            u32 address = __dp4a(at.row[i % 2], (u32)sizeof(table.levels[0]) << (8 * value), first);
            asm volatile("ld.shared.u32 %0, [%1];" : "=r"(pair[e]) : "r"(address) : "memory");
        }
        a[i] = __byte_perm(pair[0], pair[1], 0x5410);
    }
}

// Returns rows I and I + 8 of codes as f16, 1024 + byte, in the order of `level_fragment`. Codes
// without look-up come by rows: [0] has those of row I, [1] those of row I + 8.
template <u32 I, u32 TYPE>
__device__ inline void half_fragment(const Group<TYPE>& group, const Book& book, u32 a[4]) {
    constexpr u32 HIGH = 0x64;
    Codes codes = group.template codes<I>(book);
    constexpr bool BY_ROWS = !is_turbo(TYPE);
    a[0] = __byte_perm(codes.pair[0], HIGH, BY_ROWS ? 0x4140 : 0x4240);
    a[1] = __byte_perm(codes.pair[BY_ROWS], HIGH, BY_ROWS ? 0x4140 : 0x4341);
    a[2] = __byte_perm(codes.pair[!BY_ROWS], HIGH, BY_ROWS ? 0x4342 : 0x4240);
    a[3] = __byte_perm(codes.pair[1], HIGH, BY_ROWS ? 0x4342 : 0x4341);
}

// Returns rows I, I + 4, I + 8 and I + 12 of looked-up codes as left operand in bytes: two words
// have rows I and I + 8, two I + 4 and I + 12. What is interleaved within a word, `byte_operand`
// takes apart.
template <u32 I, u32 TYPE>
__device__ inline void byte_fragment(const Group<TYPE>& group, const Book& book, u32 a[4]) {
    Codes codes = group.template codes<I>(book), later = group.template codes<I + 4>(book);
    a[0] = codes.pair[0], a[1] = later.pair[0], a[2] = codes.pair[1], a[3] = later.pair[1];
}

// Returns the right operand of codes for column `column`, from bytes of four values: those that
// meet rows I and I + 4 in an even column, rows I + 8 and I + 12 in an odd one, zeros elsewhere.
__device__ inline uint2 byte_operand(u32 four, u32 column) {
    bool is_odd = column % 2;
    return make_uint2(__byte_perm(four, 0, is_odd ? 0x1404 : 0x4140), __byte_perm(four, 0, is_odd ? 0x3424 : 0x4342));
}

// Adds a product of bytes, [16][32] by [32][8], to `c`. Codes and queries are signed, weights are
// not.
__device__ inline void multiply_queries(int c[4], const u32 a[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline void multiply_weights(int c[4], const u32 a[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The right operands of f16 rows I and I + 4 (even columns), I + 8 and I + 12 (odd ones): of values
// 0 and 1, and of values 2 and 3.
struct HalfOperands {
    u32 b[4];

    // Sets the four values of a lane's column.
    __device__ void set(uint2 four, u32 lane) {
        u32 odd = 0 - lane / 4 % 2;
        b[0] = four.x & ~odd, b[1] = four.x & odd, b[2] = four.y & ~odd, b[3] = four.y & odd;
    }
    // Adds the products with rows I and I + 8, and I + 4 and I + 12.
    __device__ void multiply_rows(float c[4], const u32 rows[4], const u32 later[4]) const {
        u32 first[4] = {rows[0], later[0], rows[1], later[1]}, second[4] = {rows[2], later[2], rows[3], later[3]};
        multiply(c, first, b[0], b[1]);
        multiply(c, second, b[2], b[3]);
    }
};

// A group of a float tile: value e of row r is number e * stride + r from its first. f32 and bf16
// beyond f16 saturate.
struct Floats {
    uint4 values[4][2];  // f16 of the 16 rows, by value
    __device__ Floats from(u32 row) const {
        Floats f = *this;
        for (u32 i = 0; row && i < 8; i++) {
            uint4& eight = f.values[i / 2][i % 2];
            eight.x = eight.y, eight.z = eight.w;
        }
        return f;
    }
};

template <u32 TYPE>
__device__ inline void load_floats(Floats& f, const u8* tile, u32 first, u32 stride) {
    for (u32 e = 0; e < 4; e++) {
        for (u32 half = 0; half < 2; half++) {
            u32 at = first + e * stride + 8 * half;
            if constexpr (TYPE == F16) {
                f.values[e][half] = __ldg((const uint4*)(tile + 2 * at));
            } else {
                float x[8];
                if constexpr (TYPE == F32) {
                    float4 low = __ldg((const float4*)(tile + 4 * at));
                    float4 high = __ldg((const float4*)(tile + 4 * at) + 1);
                    x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
                    x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
                } else {
                    uint4 eight = __ldg((const uint4*)(tile + 2 * at));
                    u32 pairs[4] = {eight.x, eight.y, eight.z, eight.w};
                    for (u32 i = 0; i < 8; i++) x[i] = from_bfloat((u16)(pairs[i / 2] >> (16 * (i % 2))));
                }
                for (u32 i = 0; i < 8; i++) x[i] = fminf(fmaxf(x[i], -HALF_MAX), HALF_MAX);
                f.values[e][half] = make_uint4(pack_halves(x[0], x[1]), pack_halves(x[2], x[3]),
                                               pack_halves(x[4], x[5]), pack_halves(x[6], x[7]));
            }
        }
    }
}

// Returns rows I and I + 8, in the order of `level_fragment`.
template <u32 I>
__device__ inline void fragment(const Floats& f, u32 a[4]) {
    constexpr u32 SELECT = I % 2 ? 0x7632 : 0x5410;
    for (u32 half = 0; half < 2; half++) {
        a[half] = __byte_perm(word<I / 2>(f.values[0][half]), word<I / 2>(f.values[1][half]), SELECT);
        a[2 + half] = __byte_perm(word<I / 2>(f.values[2][half]), word<I / 2>(f.values[3][half]), SELECT);
    }
}
