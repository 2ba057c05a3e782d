// Attention of a few query tokens over keys with per-channel scales and values with per-token scales. Needs tokens.h.
//
// Macros: KEY_BITS and VALUE_BITS: bit widths. GROUP: channels of a value that share a scale.
//
// A part of the context of a KV head is processed in pieces of at most one page: scores, then weights, then values. A
// Context knows where the data is: pool(which, page) returns the codes, scales and zero points of a page of keys (which
// = 0, 1, 2) and of values (3, 4, 5). In addition it has the functions that RunningSoftmax::add_all_exact needs.
namespace {

constexpr int VECTORS = HEAD / LANES, GROUPS = HEAD / GROUP, PAGES_PER_PART = 16;

// The weight of the codes of each token. Codes are masked but not shifted.
template <int BITS>
struct Units {
    float of[PAGE];
    constexpr Units() : of() {
        for (int t = 0; t < PAGE; t++) of[t] = 1.0f / (1 << t / (PAGE * BITS / 8) * BITS);
    }
};

struct Part : RunningSoftmax {
    float scores[QUERIES * PAGE];

    using RunningSoftmax::RunningSoftmax;

    void score_page(const uint8_t* codes, const Scale* scales, const Scale* zeros) {
        constexpr int PLANES = 8 / KEY_BITS, ROWS = PAGE / PLANES, ONES = (1 << KEY_BITS) - 1;
        static constexpr Units<KEY_BITS> units;
        Floats scaled_query[QUERIES][VECTORS], zero[QUERIES] = {};
        for (int v = 0; v < VECTORS; v++) {
            const Floats scale = read(scales + v * LANES), zero_point = read(zeros + v * LANES);
            for (int r = 0; r < QUERIES; r++) {
                const Floats own = load<Floats>(q + r * HEAD + v * LANES);
                scaled_query[r][v] = own * scale;
                zero[r] += own * zero_point;
            }
        }
        for (int row = 0; row < ROWS; row++) {
            Floats found[PLANES][QUERIES] = {};
            UNROLLED for (int v = 0; v < VECTORS; v++) {
                const Ints loaded = widened(codes + row * HEAD + v * LANES);
                UNROLLED for (int plane = 0; plane < PLANES; plane++) {
                    const Floats field = numbers(loaded & ONES << KEY_BITS * plane);
                    UNROLLED for (int r = 0; r < QUERIES; r++) found[plane][r] += field * scaled_query[r][v];
                }
            }
            UNROLLED for (int plane = 0; plane < PLANES; plane++)
                UNROLLED for (int r = 0; r < QUERIES; r++) products[r * PAGE + plane * ROWS + row] = found[plane][r];
        }
        for (int r = 0; r < QUERIES; r++) {
            const float base = total(zero[r]);
            for (int t = 0; t < PAGE; t += LANES)
                store(scores + r * PAGE + t, sums(products + r * PAGE + t) * load<Floats>(units.of + t) + base);
        }
    }

    void add_page(const uint8_t* codes, const Scale* scales, const Scale* zeros) {
        constexpr int PLANES = 8 / VALUE_BITS, ROWS = PAGE / PLANES, ONES = (1 << VALUE_BITS) - 1;
        static constexpr Units<VALUE_BITS> units;
        float weights[GROUPS][QUERIES][PAGE], all_scales[PAGE * GROUPS], all_zeros[PAGE * GROUPS];
        for (int i = 0; i < PAGE * GROUPS; i += LANES) {
            store(all_scales + i, read(scales + i));
            store(all_zeros + i, read(zeros + i));
        }
        for (int g = 0; g < GROUPS; g++) {
            float scale[PAGE], zero_point[PAGE];
            for (int t = 0; t < PAGE; t++) scale[t] = all_scales[t * GROUPS + g] * units.of[t];
            for (int t = 0; t < PAGE; t++) zero_point[t] = all_zeros[t * GROUPS + g];
            for (int r = 0; r < QUERIES; r++) {
                Floats base = {};
                for (int t = 0; t < PAGE; t += LANES) {
                    const Floats weight = load<Floats>(scores + r * PAGE + t);
                    store(weights[g][r] + t, weight * load<Floats>(scale + t));
                    base += weight * load<Floats>(zero_point + t);
                }
                const float more = total(base);
                float* own = out + r * HEAD + g * GROUP;
                for (int d = 0; d < GROUP; d += LANES) store(own + d, load<Floats>(own + d) + more);
            }
        }
        for (int g = 0; g < GROUPS; g++)
            for (int d = g * GROUP; d < (g + 1) * GROUP; d += LANES) {
                Floats found[QUERIES];
                UNROLLED for (int r = 0; r < QUERIES; r++) found[r] = load<Floats>(out + r * HEAD + d);
                for (int row = 0; row < ROWS; row++) {
                    const Ints loaded = widened(codes + row * HEAD + d);
                    UNROLLED for (int plane = 0; plane < PLANES; plane++) {
                        const Floats field = numbers(loaded & ONES << VALUE_BITS * plane);
                        const int t = plane * ROWS + row;
                        UNROLLED for (int r = 0; r < QUERIES; r++) found[r] += field * weights[g][r][t];
                    }
                }
                UNROLLED for (int r = 0; r < QUERIES; r++) store(out + r * HEAD + d, found[r]);
            }
    }

    void weigh_page(int64_t page) {
        hide(SINKS + page * PAGE, PAGE, scores, PAGE);
        weigh(PAGE, scores, PAGE, [](int, float) {});
    }

    template <typename Context>
    void score_keys_of(const Context& context, int64_t page) {
        const auto *scales = (const Scale*)context.pool(1, page), *zeros = (const Scale*)context.pool(2, page);
        score_page(context.pool(0, page), scales, zeros);
    }

    // Adds pages whose keys and values are packed.
    template <typename Context>
    void add_pages(const Context& context, int64_t begin, int64_t end) {
        for (int64_t page = begin; page < end; page++) {
            if (hides_page(page)) continue;
            score_keys_of(context, page);
            weigh_page(page);
            const auto *scales = (const Scale*)context.pool(4, page), *zeros = (const Scale*)context.pool(5, page);
            add_page(context.pool(3, page), scales, zeros);
        }
    }

    // Adds the tokens whose values are exact: pages [packed, key_pages), whose keys are packed, all later tokens, and
    // sinks.
    template <typename Context>
    void add_exact_tokens(const Context& context, int64_t packed, int64_t key_pages, int64_t total) {
        for (int64_t page = packed; page < key_pages; page++) {
            if (hides_page(page)) continue;
            score_keys_of(context, page);
            weigh_page(page);
            add_exact(PAGE, [&](int t) { return context.value(SINKS + page * PAGE + t); }, scores, PAGE);
        }
        const int64_t first = SINKS + std::max(packed, key_pages) * PAGE;
        add_all_exact(context, first, total, scores, PAGE, [](int, float) {});
    }
};

// Attention of the queries of each sample. q, out: [samples, heads, queries.count, HEAD]. For each sample, total is the
// number of tokens, packed the number of pages whose values are packed, and key_pages the number of pages whose keys are packed.
// scale: factor of the scores. contexts(b, head): the Context of a KV head of sample b.
template <typename Contexts>
void attend_all(
    const Token* q, float scale, Token* out, const int64_t* total, const int64_t* packed, const int64_t* key_pages,
    int64_t samples, int64_t heads, const Contexts& contexts, int64_t threads, const Queries& queries
) {
    std::vector<int64_t> sample_of, first(samples + 1);  // per part; the last one of a sample adds exact tokens
    for (int64_t b = 0; b < samples; b++) {
        first[b] = sample_of.size();
        sample_of.insert(sample_of.end(), packed[b] / PAGES_PER_PART + 1, b);
    }
    first[samples] = sample_of.size();
    const int64_t parts = first[samples], blocks = queries.blocks(), tasks = heads * blocks;
    const int64_t rows = parts * tasks * QUERIES;
    std::vector<float> outs(rows * HEAD), peak(rows), sum(rows);
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < parts * tasks; i++) {
        const int64_t part = i / tasks, b = sample_of[part], begin = (part - first[b]) * PAGES_PER_PART;
        const int64_t head = i % tasks / blocks;
        const auto context = contexts(b, head);
        const Token* of_head = q + (b * heads + head) * queries.count * HEAD;
        Part found = queries.start<Part>(of_head, b, head, i % blocks, total[b], scale);
        found.add_pages(context, begin, std::min(begin + PAGES_PER_PART, packed[b]));
        if (part + 1 == first[b + 1]) found.add_exact_tokens(context, packed[b], key_pages[b], total[b]);
        std::copy(found.out, found.out + QUERIES * HEAD, outs.data() + i * QUERIES * HEAD);
        std::copy(found.peak, found.peak + QUERIES, peak.data() + i * QUERIES);
        std::copy(found.sum, found.sum + QUERIES, sum.data() + i * QUERIES);
    }
    for (int64_t b = 0; b < samples; b++)
        for (int64_t row = 0; row < heads * queries.count; row++) {
            const int64_t own = row / queries.count * blocks * QUERIES + row % queries.count;
            const float sink = queries.sink(row / queries.count, row % queries.count);
            float high = std::max(sink, peak[first[b] * tasks * QUERIES + own]), sums[HEAD] = {};
            for (int64_t part = first[b]; part < first[b + 1]; part++)
                high = std::max(high, peak[part * tasks * QUERIES + own]);
            float all = std::exp2(sink - high);
            for (int64_t part = first[b]; part < first[b + 1]; part++) {
                const int64_t at = part * tasks * QUERIES + own;
                const float rescale = std::exp2(peak[at] - high);
                all += sum[at] * rescale;
                for (int d = 0; d < HEAD; d++) sums[d] += outs[at * HEAD + d] * rescale;
            }
            Token* to = out + (b * heads * queries.count + row) * HEAD;
            for (int d = 0; d < HEAD; d++) round_to(to[d], attended(sums[d], all));
            if (queries.lse) queries.lse[b * heads * queries.count + row] = log_sum_exp(high, all);
        }
}

}  // namespace
