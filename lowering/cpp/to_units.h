// Tokens in units of the scales of their groups (fit_rms of kvpass/codec/codebook.py), rotated first or not
// (kvpass/codec/hadamard.py). Needs tokens.h, and a build that does not fuse products and sums, so that numbers are those
// of the reference.
//
// Macros: GROUP: channels that share a scale. ROTATED: whether tokens are rotated. UNIT: factor of the units.
namespace {

constexpr int GROUPS = HEAD / GROUP;

// Sylvester's matrix, in runs of the largest power of two that divides HEAD.
inline void rotate(float* x, const float* signs) {
    constexpr int SIZE = HEAD & -HEAD;
    for (int i = 0; i < HEAD; i++) x[i] *= signs[i];
    for (int half = 1; half < SIZE; half *= 2) {
        float next[HEAD];
        for (int start = 0; start < HEAD; start += 2 * half)
            for (int i = start; i < start + half; i++) {
                next[i] = x[i] + x[i + half];
                next[i + half] = x[i] - x[i + half];
            }
        std::copy_n(next, HEAD, x);
    }
    for (int i = 0; i < HEAD; i++) x[i] /= std::sqrt((float)SIZE);
}

// scales: [GROUPS]. put(i, x) receives channel i.
template <typename Put>
inline void to_units(const Token* token, const float* signs, Scale* scales, Put put) {
    float x[HEAD];
    to_floats<HEAD>(token, x);
    if (ROTATED) rotate(x, signs);
    for (int g = 0; g < GROUPS; g++) {
        double squares = 0;
        for (int i = g * GROUP; i < (g + 1) * GROUP; i++) squares += (double)x[i] * x[i];
        round_to(scales[g], (float)std::sqrt(squares / GROUP));
        const float scale = number(scales[g]), by = scale > 0 ? scale : 1;
        for (int i = g * GROUP; i < (g + 1) * GROUP; i++) put(i, (float)UNIT * x[i] / by);
    }
}

}  // namespace
