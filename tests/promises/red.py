"""The promises of this folder that are not kept yet: file, test, row of the table, and (construct: variants).

A test that is listed must fail. Whoever mends it takes it out of the list; conftest.py makes the marks.
"""

Red = dict[str, dict[str, tuple[str, dict[str, str]]]]

RED: Red = {
    "test_promises_after.py": {
        "test_what_changed_since_the_steps": (
            "something changed after the steps: leaves that are not the record's, or a text that does not name it",
            {
                "the outer variable detached in step 2": "memory unroll forward",
                "a scaled gradient after the steps": "reverse sqrt blocks tasks",
            },
        )
    },
    "test_promises_bare.py": {
        "test_a_graph_made_before_the_block_and_differentiated_after_it": (
            "a graph made before the block and differentiated after it",
            {"0": "reverse sqrt memory blocks unroll forward", "2": "reverse sqrt memory blocks unroll forward"},
        ),
        "test_an_abandoned_generator_closes_its_own_block": ("an abandoned generator closes another block", {"": ""}),
    },
    "test_promises_blocks.py": {
        "test_what_a_block_gives_and_reads": (
            "blocks= does not see attributes, hooks, lists, a momentum that moves",
            {
                "a balance loss in an attribute": "auto",
                "a balance loss with a learnable weight": "auto",
                "features by a hook": "auto",
                "features in a list": "auto",
                "features in a dict": "auto",
                "a momentum that a schedule moves": "auto",
            },
        )
    },
    "test_promises_buffers.py": {
        "test_a_state_that_steps_change_and_losses_read": (
            "own buffers changed and read; state that is no buffer",
            {
                "written through .data": "tasks",
                "complex, replaced": "reverse sqrt memory blocks unroll forward tasks",
                "complex, in place": "reverse sqrt memory blocks unroll forward tasks",
                "in place, read by h alone": "memory unroll forward",
                "replaced, read by h alone": "memory unroll forward",
                "complex, read by h alone": "reverse sqrt memory blocks unroll forward tasks",
                "a range, read by h alone": "memory unroll forward",
                "in a plain attribute": "memory unroll forward",
                "in a list": "reverse sqrt memory blocks unroll forward tasks",
                "in a frozen parameter": "memory unroll forward tasks",
                "a target network of the loop": "memory unroll forward tasks",
            },
        )
    },
    "test_promises_direction.py": {
        "test_a_direction_with_a_state_of_its_own": (
            "direction= with a state of its own",
            {
                "clipped at the first norm": "reverse sqrt memory blocks unroll forward tasks micro accumulate",
                "noise of its own generator": "tasks",
            },
        ),
        "test_a_derivative_that_is_cut_in_direction": (
            ".item() or .detach() in direction=",
            {
                "item": "tasks",
                "float": "tasks",
                "tolist": "tasks",
                "data": "tasks",
                "numpy": "tasks",
                "no_grad": "reverse sqrt memory blocks unroll tasks",
                "an outer variable, detached": "reverse sqrt memory blocks unroll forward tasks",
                "an outer variable by item": "reverse sqrt memory blocks unroll forward tasks",
            },
        ),
        "test_a_function_of_the_direction_is_right": (
            "random numbers in direction= under tasks= (a bare error of vmap)",
            {"torch's own noise": "tasks"},
        ),
        "test_a_cut_in_a_later_step_alone": (".item() in direction=, in some steps alone", {"": "tasks"}),
    },
    "test_promises_later.py": {
        "test_a_construct_in_a_later_step": (
            "in a later step: parameter lists, once_differentiable, checkpointing, padding_idx, hooks",
            {
                "once_differentiable": "tasks",
                "a backward that cuts": "tasks",
                "reentrant checkpointing": "tasks",
                "a hook on a tensor": "tasks",
                "a hook by another name": "tasks",
            },
        ),
        "test_a_path_that_is_cut_in_one_step_alone": (
            "a path that is cut in one step alone, where the sentinel does not look",
            {
                "detach in step 2 of 4": "reverse sqrt memory blocks unroll forward tasks",
                "no_grad in step 2 of 4": "reverse sqrt memory blocks unroll forward tasks",
                "data in step 2 of 4": "reverse sqrt memory blocks unroll forward tasks",
                "numpy in step 2 of 4": "reverse sqrt memory blocks unroll forward tasks",
                "a backward that cuts, in step 2 of 4": "reverse sqrt memory blocks unroll forward tasks",
            },
        ),
        "test_a_schedule_that_changes_the_gradient_alone": (
            "a flag or coefficient that changes the gradient alone",
            {
                "warm-up by detach": "reverse sqrt tasks",
                "warm-up by no_grad": "reverse sqrt tasks",
                "gradient reversal": "tasks",
                "a scaled gradient": "memory blocks unroll forward micro accumulate",
                "warm-up by detach, with biases": "reverse sqrt tasks",
                "gradient reversal, with biases": "tasks",
            },
        ),
    },
    "test_promises_leftover.py": {
        "test_optimizer_step": ("a leftover optimizer.step() does nothing in silence", {"": "reverse unroll forward"}),
        "test_loss_backward": ("a leftover loss.backward() does nothing in silence", {"": "reverse unroll forward"}),
    },
    "test_promises_micro.py": {
        "test_a_loss_of_the_whole_batch": (
            "micro= with losses of the whole batch that look like means",
            {"a mean over a mask, whole at first": "reverse sqrt memory blocks unroll forward"},
        )
    },
    "test_promises_sentinel.py": {
        "test_a_second_configuration_of_the_same_code_is_looked_at": (
            "the sentinel does not look at a second configuration",
            {"": "in_the_batch"},
        ),
        "test_an_added_outer_loss_is_looked_at": ("the sentinel looks at the last outer loss alone", {"": ""}),
    },
    "test_promises_start.py": {
        "test_an_outer_loss_that_closes_over_the_initial_weights": (
            "g that holds w_0",
            {"reverse": "weights clones", "sqrt": "weights clones", "memory": "weights clones"},
        )
    },
    "test_promises_statistics.py": {
        "test_batchnorm_of_a_module_outside_of_the_model": (
            "an encoder outside of the model with BatchNorm",
            {
                "trained in both": "tasks",
                "eval in g": "tasks",
                "trained in both, and one in the model": "tasks",
                "eval in g, and one in the model": "tasks",
                "instance norm, eval in g": "tasks",
            },
        ),
        "test_statistics_outside_have_no_graph_and_move_as_in_the_plain_loop": (
            "an encoder outside of the model with BatchNorm",
            {"train-": "tasks", "train-norm": "tasks", "eval-": "tasks", "eval-norm": "tasks"},
        ),
        "test_a_second_outer_step_with_an_encoder_outside": (
            "an encoder outside of the model with BatchNorm",
            {"train-": "tasks", "train-norm": "tasks", "eval-": "tasks", "eval-norm": "tasks"},
        ),
        "test_statistics_moved_by_something_else_than_a_step": (
            "a forward under no_grad in h; subclasses of BatchNorm",
            {
                "a forward under no_grad in h": "tasks",
                "a detached forward of a part in h": "reverse sqrt memory blocks unroll forward tasks",
                "a subclass that moves them itself": "tasks",
            },
        ),
    },
    "test_promises_tasks.py": {
        "test_tasks_with_what_needs_a_value": (
            "tasks= with .item(), float(), a branch, .numpy() in a loss",
            {
                "item": "tasks",
                "float": "tasks",
                "a branch": "tasks",
                "numpy": "tasks",
                "tolist": "tasks",
                "int": "tasks",
                "a format": "tasks",
                "nonzero": "tasks",
                "data": "tasks",
                "an assertion": "tasks",
                "a write to a closed-over tensor": "tasks",
            },
        ),
        "test_a_model_that_sets_an_attribute_has_living_tensors_in_it_after_the_block": (
            "tasks= leaves dead tensors in attributes",
            {"": "tasks"},
        ),
    },
}
