// Vectors as compilers know them, of as many lanes as the processor has.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
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

#define UNROLLED _Pragma("GCC unroll 16")  // so that what loops add up stays in registers

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

inline Ints widened(const uint8_t* from) {  // compilers take bytes apart one by one, unless they are told
#if LANES == 16
    return (Ints)_mm512_cvtepu8_epi32(load<__m128i>(from));
#elif LANES == 8
    return (Ints)_mm256_cvtepu8_epi32(_mm_loadu_si64(from));
#else
    return __builtin_convertvector(load<Bytes>(from), Ints);
#endif
}

inline Floats numbers(Ints x) { return __builtin_convertvector(x, Floats); }

}  // namespace
