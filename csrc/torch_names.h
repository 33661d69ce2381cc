// Names that torch says by itself, and that a later torch may change: the part of torch_internals.h that needs no
// torch.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <iterator>
#include <string>
#include <vector>

namespace zx::internals {

// Without these overlap_gather() and stage 3 don't see what compiled code reads.

constexpr char kRegion[] = "Torch-Compiled Region";  // begins what Dynamo announces
constexpr char kShowsInputs[] = "CompiledFunction";  // the function in it that autograd announces, with inputs
constexpr char kBackward[] = "Backward";             // behind the name of a function in Python, of its backward
constexpr char kOfDTensor[] = "_spec";               // how it lies
constexpr char kLocalTensor[] = "_local_tensor";     // without these two, gradients are found by slower calls of Python
constexpr char kOwn[] = "aten::";                    // without it, writes of parameters are noticed that were none
constexpr char kCollective[] = "c10d::";             // without it, a collective on sharded parameters is not refused
// Those that no rank but two take part in. Without these, a rank that sends is taken for one that waits for all.
constexpr const char* kOfTwoRanks[] = {"c10d::send", "c10d::recv_", "c10d::recv_any_source_"};
constexpr char kDetach[] = "detach";  // no operator's name, but so it is announced
// All that `p.data = ...` announces. Without it, step() would fetch what it is about to move.
constexpr char kSetsData[] = "aten::_has_compatible_shallow_copy_type";
// What nn.Embedding(max_norm=) calls before it looks up. Without it, ranks would write rows of their own batches.
constexpr char kRenorm[] = "aten::embedding_renorm_";

// An operator that reads the rows that it is given indices of, and no others. Without it, a lookup fetches all rows.
struct Lookup {
  const char* name;
  size_t table;
  size_t indices;
};
constexpr Lookup kLookups[] = {
    {"aten::embedding", 0, 1},
    {"aten::embedding_bag", 0, 1},
    {"aten::_embedding_bag", 0, 1},
    {"aten::_embedding_bag_forward_only", 0, 1},
    {"aten::_embedding_bag_per_sample_weights_backward", 1, 2},
};

// They read what a tensor is like, and make others like it. Without one, it fetches a table.
constexpr const char* kReadNoValue[] = {"aten::empty_like",        "aten::zeros_like",   "aten::ones_like",
                                        "aten::full_like",         "aten::new_empty",    "aten::new_zeros",
                                        "aten::new_ones",          "aten::new_full",     "aten::randn_like",
                                        "aten::new_empty_strided", "aten::is_same_size", "aten::rand_like"};

// The dispatcher keeps its names while the C++ methods are being renamed (_reduce_scatter_base became
// reduce_scatter_single between torch 2.11 and 2.13), so these collectives are called by name.
constexpr char kAllGather[] = "c10d::_allgather_base_";
constexpr char kReduceScatter[] = "c10d::_reduce_scatter_base_";
constexpr char kAllToAll[] = "c10d::alltoall_base_";

template <size_t size>
bool begins_with(const char* name, const char (&prefix)[size]) {
  return std::strncmp(name, prefix, size - 1) == 0;
}

inline bool is_collective_of_all(const char* name) {
  const auto is_name = [name](const char* each) { return std::strcmp(name, each) == 0; };
  return begins_with(name, kCollective) && std::none_of(std::begin(kOfTwoRanks), std::end(kOfTwoRanks), is_name);
}

inline bool reads_no_value(const char* name) {
  const auto is_name = [name](const char* each) { return std::strcmp(name, each) == 0; };
  return is_name(kDetach) || std::any_of(std::begin(kReadNoValue), std::end(kReadNoValue), is_name);
}

// Whether the name is that of an autograd function's backward; without what is behind the function's own.
inline std::string function_of(const std::string& backward) {
  const size_t behind = sizeof(kBackward) - 1;
  const bool is_one = backward.size() > behind && backward.compare(backward.size() - behind, behind, kBackward) == 0;
  return is_one ? backward.substr(0, backward.size() - behind) : "";
}

// What stage 3 must meet by these names, or it would give wrong values or fetch what nobody reads.
inline std::vector<std::string> operator_names() {
  std::vector<std::string> names(std::begin(kReadNoValue), std::end(kReadNoValue));
  for (const char* name : kOfTwoRanks) names.emplace_back(name);
  for (const Lookup& lookup : kLookups) names.emplace_back(lookup.name);
  for (const char* name : {kSetsData, kRenorm, kAllGather, kReduceScatter, kAllToAll}) names.emplace_back(name);
  return names;
}

}  // namespace zx::internals
