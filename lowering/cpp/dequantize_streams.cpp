// Dequantizes a chunk whose codes are entropy coded, from its decompressed streams to tokens. Needs vectors.h.
//
// Macros: HEAD channels per head, BLOCK neighbouring channels that a basis mixes, PAGE tokens, RANKS of a page's tokens,
// PAIRS of channels that are rotated by the token in the middle of their page, INTERLEAVED or not. CENTERED: whether
// there is a mean. TOKENS of a rank are read at a time.
//
// streams: first byte, bytes, codes per byte, largest code of a byte, and first row of each.
// places: row among the rows of all streams, and stream, of each row [RANKS, items, HEAD].
// exceptions: place of the code in all streams, and code, in ascending order.
// basis: [RANKS, items, HEAD, BLOCK], times the step of each coordinate. masks: [items, pages, PAGE / 8], if RANKS is 2.
// mean: [items, PAGE, HEAD], added before the rotation. cos, sin: [pages, PAIRS].
// out: pages of an item are adjacent, and items are stride floats apart.

namespace {

constexpr int64_t IN_PAGE = PAGE / RANKS;  // tokens of a rank
constexpr int MOST = 5;                    // codes in a byte
constexpr int VECTORS = BLOCK % (2 * LANES) ? 1 : 2;

struct Stream {
    int64_t first_byte, bytes, per_byte, largest, first_row;
};

// The codes that bytes of a stream hold.
struct Digits {
    float of[MOST][256];

    explicit Digits(const Stream& stream) {
        const int base = 2 * stream.largest + 1;
        for (int byte = 0; byte < 256; byte++)
            for (int left = byte, j = stream.per_byte - 1; j >= 0; j--, left /= base)
                of[j][byte] = (j ? left % base : left) - (float)stream.largest;
    }
};

// Reads the count codes of a row of a stream. The j-th code of all bytes are adjacent in it.
void read_row(const uint8_t* data, const Stream& stream, const Digits& digits, int64_t row, int64_t count, float* to) {
    for (int64_t at = row * count, left = count; left > 0;) {
        const int64_t j = at / stream.bytes, byte = at % stream.bytes, some = std::min(left, stream.bytes - byte);
        const uint8_t* from = data + stream.first_byte + byte;
        for (int64_t t = 0; t < some; t++) to[t] = digits.of[j][from[t]];
        to += some, at += some, left -= some;
    }
}

// Finds the token in each slot of the ranks [RANKS, pages * IN_PAGE].
void find_tokens(const uint8_t* masks, int64_t pages, int64_t* tokens) {
    for (int64_t n = 0; n < pages; n++) {
        int64_t found[2] = {};
        for (int t = 0; t < PAGE; t++) {
            const int high = RANKS == 2 && masks[n * (PAGE / 8) + t % (PAGE / 8)] >> t / (PAGE / 8) & 1;
            const int rank = RANKS == 2 && !high;
            tokens[(rank * pages + n) * IN_PAGE + std::min(found[rank]++, IN_PAGE - 1)] = n * PAGE + t;
        }
    }
}

// Coordinates of TOKENS tokens, count floats apart, in all blocks of a basis.
void from_basis(const float* codes, int64_t count, const float* basis, float to[TOKENS][HEAD]) {
    for (int block = 0; block < HEAD; block += BLOCK)
        for (int d = 0; d < BLOCK; d += VECTORS * LANES) {
            Floats sum[TOKENS][VECTORS] = {};
            for (int c = block; c < block + BLOCK; c++) {
                Floats row[VECTORS];
                UNROLLED
                for (int v = 0; v < VECTORS; v++) row[v] = load<Floats>(basis + c * BLOCK + d + v * LANES);
                UNROLLED
                for (int j = 0; j < TOKENS; j++)
                    UNROLLED
                    for (int v = 0; v < VECTORS; v++) sum[j][v] += codes[c * count + j] * row[v];
            }
            for (int j = 0; j < TOKENS; j++)
                for (int v = 0; v < VECTORS; v++) store(to[j] + block + d + v * LANES, sum[j][v]);
        }
}

void rotate(float* x, const float* cos, const float* sin) {
    for (int p = 0; p < PAIRS; p++) {
        float &first = x[INTERLEAVED ? 2 * p : p], &second = x[INTERLEAVED ? 2 * p + 1 : p + PAIRS];
        const float turned = first * cos[p] - second * sin[p];
        second = second * cos[p] + first * sin[p];
        first = turned;
    }
}

}  // namespace

extern "C" void kernel(
    const uint8_t* data, const int64_t* streams, const int64_t* places, const int32_t* exceptions, const float* basis,
    const uint8_t* masks, const float* mean, const float* cos, const float* sin, float* out, int64_t number,
    int64_t large, int64_t items, int64_t pages, int64_t stride, int64_t threads
) {
    struct Exception {
        int32_t place, code;
    };
    const auto* stream_of = reinterpret_cast<const Stream*>(streams);
    const auto *first = reinterpret_cast<const Exception*>(exceptions), *last = first + large;
    const int64_t count = pages * IN_PAGE;
    std::vector<Digits> digits;
    for (int64_t s = 0; s < number; s++) digits.emplace_back(stream_of[s]);
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < items; i++) {
        std::vector<float> codes(HEAD * count);
        std::vector<int64_t> tokens(RANKS * count);
        find_tokens(masks + i * pages * (PAGE / 8), pages, tokens.data());
        for (int64_t rank = 0; rank < RANKS; rank++) {
            for (int64_t c = 0; c < HEAD; c++) {
                const int64_t *place = places + 2 * ((rank * items + i) * HEAD + c), row = place[0], s = place[1];
                float* to = codes.data() + c * count;
                read_row(data, stream_of[s], digits[s], row - stream_of[s].first_row, count, to);
                const auto before = [](const Exception& one, int64_t place) { return one.place < place; };
                const auto* one = std::lower_bound(first, last, row * count, before);
                for (; one < last && one->place < (row + 1) * count; one++) to[one->place - row * count] = one->code;
            }
            for (int64_t t = 0; t < count; t += TOKENS) {
                float found[TOKENS][HEAD];
                from_basis(codes.data() + t, count, basis + (rank * items + i) * HEAD * BLOCK, found);
                for (int j = 0; j < TOKENS; j++) {
                    const int64_t token = tokens[rank * count + t + j], page = token / PAGE;
                    float* x = found[j];
                    if (CENTERED) {
                        const float* of_token = mean + (i * PAGE + token % PAGE) * HEAD;
                        for (int d = 0; d < HEAD; d++) x[d] += of_token[d];
                    }
                    rotate(x, cos + page * PAIRS, sin + page * PAIRS);
                    std::copy(x, x + HEAD, out + i * stride + token * HEAD);
                }
            }
        }
    }
}
