// Vector types and functions, built on compilers' vector extensions, with as many lanes as the processor has.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("tree-loop-vectorize")  // Inductor disables it, because its loops are already vectors
#endif
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif

#define UNROLLED _Pragma("GCC unroll 16")  // keeps the sums of loops in registers

namespace {

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint8_t Bytes __attribute__((vector_size(LANES)));

constexpr int padded(int count) { return (count + LANES - 1) / LANES * LANES; }

template <typename Vector, typename Scalar>
inline Vector load(const Scalar* from) {
    Vector found;
    std::memcpy(&found, from, sizeof(found));
    return found;
}

inline void store(float* to, Floats x) { std::memcpy(to, &x, sizeof(x)); }

inline Ints widened(const uint8_t* from) {  // without intrinsics, compilers convert bytes one by one
#if LANES == 16
    return (Ints)_mm512_cvtepu8_epi32(load<__m128i>(from));
#elif LANES == 8
    return (Ints)_mm256_cvtepu8_epi32(_mm_loadu_si64(from));
#else
    return __builtin_convertvector(load<Bytes>(from), Ints);
#endif
}

inline Floats numbers(Ints x) { return __builtin_convertvector(x, Floats); }

inline float largest(Floats x) {
    float found = x[0];
    for (int i = 1; i < LANES; i++) found = std::max(found, x[i]);
    return found;
}

// Adds the two halves of each group of 2 * HALF lanes: those of a to the first half, those of b to the second half.
template <int HALF, size_t... LANE>
inline Floats folded(Floats a, Floats b, std::index_sequence<LANE...>) {
#define OF_BOTH int(LANE / (2 * HALF) * 2 * HALF + LANE % HALF + (LANE / HALF % 2 ? LANES : 0))
#if defined(__clang__)
    return __builtin_shufflevector(a, b, OF_BOTH...) + __builtin_shufflevector(a, b, (OF_BOTH + HALF)...);
#else
    return __builtin_shuffle(a, b, Ints{OF_BOTH...}) + __builtin_shuffle(a, b, Ints{(OF_BOTH + HALF)...});
#endif
#undef OF_BOTH
}

// Lane i of the result is the sum of the lanes of x[i].
template <int HALF = LANES / 2>
inline Floats sums(Floats* x) {
    UNROLLED for (int i = 0; i < HALF; i++) x[i] = folded<HALF>(x[i], x[i + HALF], std::make_index_sequence<LANES>());
    if constexpr (HALF > 1) return sums<HALF / 2>(x);
    return x[0];
}

template <int HALF = LANES / 2>
inline float total(Floats x) {
    x = folded<HALF>(x, x, std::make_index_sequence<LANES>());
    if constexpr (HALF > 1) return total<HALF / 2>(x);
    return x[0];
}

template <int HALF, size_t... LANE>
inline void exchange(Floats& a, Floats& b, std::index_sequence<LANE...>) {
#define OF_FIRST int(LANE & HALF ? LANES + LANE - HALF : LANE)
#define OF_SECOND int(LANE & HALF ? LANES + LANE : LANE + HALF)
    const Floats first = a, second = b;
#if defined(__clang__)
    a = __builtin_shufflevector(first, second, OF_FIRST...);
    b = __builtin_shufflevector(first, second, OF_SECOND...);
#else
    a = __builtin_shuffle(first, second, Ints{OF_FIRST...});
    b = __builtin_shuffle(first, second, Ints{OF_SECOND...});
#endif
#undef OF_FIRST
#undef OF_SECOND
}

// Lane i of x[j] becomes lane j of x[i].
template <int HALF = LANES / 2>
inline void transpose(Floats* x) {
    UNROLLED for (int i = 0; i < LANES; i++)
        if (!(i & HALF)) exchange<HALF>(x[i], x[i + HALF], std::make_index_sequence<LANES>());
    if constexpr (HALF > 1) transpose<HALF / 2>(x);
}

inline float dot(const float* a, const float* b, int count) {
    Floats sum = {};
    int i = 0;
    for (; i + LANES <= count; i += LANES) sum += load<Floats>(a + i) * load<Floats>(b + i);
    float rest = 0;
    for (; i < count; i++) rest += a[i] * b[i];
    return total(sum) + rest;
}

constexpr float LN_2 = 0.6931471805599453f;

// 2 to the power of x, for x <= 0.
inline Floats exp2(Floats x) {
    constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
    x = x > -126.0f ? x : Floats{} - 126.0f;
    const Floats whole = x + ROUND, f = x - (whole - ROUND);
    Floats p = f * 1.3266971e-3f + 9.6754599e-3f;
    p = p * f + 5.5507425e-2f;
    p = p * f + 2.4022122e-1f;
    p = p * f + 6.9314694e-1f;
    p = p * f + 1.0000001f;
    return (Floats)((Ints)p + ((Ints)whole << 23));
}

// Converts scores (base-2 logarithms) to weights relative to the largest score so far, and updates this one in peak.
// Returns the sum of the weights. count is a multiple of LANES.
inline float to_weights(float* scores, int count, float& peak) {
    Floats high = Floats{} + peak, sum = {};
    for (int t = 0; t < count; t += LANES) {
        const Floats x = load<Floats>(scores + t);
        high = x > high ? x : high;
    }
    peak = largest(high);
    for (int t = 0; t < count; t += LANES) {
        const Floats weight = exp2(load<Floats>(scores + t) - peak);
        store(scores + t, weight);
        sum += weight;
    }
    return total(sum);
}

}  // namespace
